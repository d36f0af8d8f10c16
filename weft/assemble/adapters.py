"""The source of adapters (LoRA): the folders that weft may read, and the adapters in them."""

from __future__ import annotations

from pathlib import Path

from weft.assemble.prepare import Prepared
from weft.client.adapters import AdapterRefused, FoundAdapter
from weft.config.engine import EngineConfig
from weft.config.model import ModelConfig, ModelError
from weft.config.options import SettingsError
from weft.config.projections import Targets
from weft.executor.lora.folders import AdapterFolders
from weft.executor.lora.read import inspect_adapter


def adapter_files(prepared: Prepared) -> AdapterFolder | None:
    """The adapters that the settings allow for the model; None if they allow none."""
    config = prepared.config
    if not config.max_loaded_loras:
        return None
    return AdapterFolder(config, prepared.model, prepared.folder)


class AdapterFolder:
    """`AdapterFiles` of one model. `config` is resolved."""

    def __init__(self, config: EngineConfig, model: ModelConfig, folder: Path) -> None:
        """`folder`: the model's folder. Raises SettingsError if `lora_dir` is no folder."""
        if config.lora_dir and not Path(config.lora_dir).expanduser().is_dir():
            raise SettingsError(f"--lora-dir is {config.lora_dir!r}, which is not a folder")
        self._folders = AdapterFolders.of(config, folder)
        self._model = model
        self._max_rank = config.max_lora_rank
        self._full_modules = config.lora_full_modules
        self._targets = Targets(config.lora_target_modules)
        self.offers = bool(config.lora_dir)

    def find(self, path: str) -> FoundAdapter:
        try:
            folder = self._folders.folder(path)
            info = inspect_adapter(
                folder, self._model, max_rank=self._max_rank, full_modules=self._full_modules
            )
        except ModelError as exc:
            raise AdapterRefused(str(exc), of_files=True) from exc
        self._require_targets(info.targets)
        return FoundAdapter(info.uid, str(folder), info.rank)

    def offered(self, name: str) -> str:
        return self._folders.offered(name)

    def _require_targets(self, targets: tuple[str, ...]) -> None:
        for target in targets:
            if target not in self._targets:
                raise AdapterRefused(
                    f"the adapter changes {target!r}; {self._targets} may be changed "
                    "(--lora-target-modules)",
                    of_files=True,
                )
