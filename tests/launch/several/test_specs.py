"""Which models a server offers: words, tables, a folder; and the errors of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.tiny_model import write_tiny_model
from weft.config.options import Settings, SettingsError
from weft.launch.serve import serve_command
from weft.launch.several.specs import ModelSpec, from_folder, read_specs
from weft.store.store import ModelStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_tiny_model(tmp_path / "models" / name)
    return tmp_path / "models"


def read(*words: str | Path) -> Settings:
    return serve_command().read([str(word) for word in words], {})


def specs(*words: str | Path) -> list[ModelSpec]:
    return read_specs(read(*words), ModelStore())


def toml(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "weft.toml"
    file.write_text(text)
    return file


def test_several_words_are_several_models(folder: Path) -> None:
    found = specs(folder / "one", "--port", "0", folder / "two", "--model-ttl-s", "60")
    assert [(one.name, one.on_start, one.ttl_s) for one in found] == [
        ("one", True, 60.0),
        ("two", True, 60.0),
    ]
    assert [one.server.served_model_name for one in found] == ["one", "two"]


def test_one_word_alone_is_a_server_with_one_model(folder: Path) -> None:
    settings = read(folder / "one", "--kv-tokens", "64")
    assert not settings.words
    assert not settings.tables


def test_a_table_has_the_settings_of_its_model(folder: Path, tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        f"""
        kv_tokens = 128
        model_ttl_s = 9
        memory = 2.5

        [models.fast]
        path = "{folder}/one"
        aliases = ["gpt-4", "small"]
        pin = true
        on_start = false
        kv-tokens = 64
        tool_call_parser = "hermes"

        [models."org/slow"]
        path = "{folder}/two"
        ttl_s = 0
        """,
    )
    fast, slow = specs("--config", file)
    assert (fast.name, fast.aliases, fast.pin, fast.on_start) == (
        "fast",
        ("gpt-4", "small"),
        True,
        False,
    )
    assert (fast.engine.kv_tokens, slow.engine.kv_tokens) == (64, 128)
    assert (fast.server.tool_call_parser, slow.server.tool_call_parser) == ("hermes", "auto")
    assert (fast.ttl_s, slow.ttl_s, slow.on_start) == (9.0, 0.0, True)


def test_each_model_has_a_cache_folder_of_its_own(folder: Path, tmp_path: Path) -> None:
    file = toml(tmp_path, f'[models."a/b"]\npath = "{folder}/one"\n')
    [one] = specs("--config", file, "--cache-dir", "/cache")
    assert one.engine.cache_dir == "/cache/a--b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\nport = 1\n", "port in [models.a]"),
        ("[models.a]\nkv_token = 1\n", "did you mean kv_tokens?"),
        ("[models.a]\nkv_tokens = 'x'\n", "kv_tokens in [models.a]"),
        ("models = 3\n", "[models.NAME] is expected"),
        ("[models]\na = 3\n", "a table is expected"),
        ("[other.a]\nkv_tokens = 3\n", "has the table [other]"),
    ],
)
def test_wrong_tables_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read("--config", toml(tmp_path, text))
    assert message in str(caught.value)


def test_two_models_with_one_name_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other" / "one")
    with pytest.raises(SettingsError) as caught:
        specs(folder / "one", tmp_path / "other" / "one")
    message = str(caught.value)
    assert message.startswith("two models have the name 'one': ")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["..", "../up", "a/../b", "a\\\\b", "x" * 200, "tab\\there"])
def test_names_that_could_leave_a_folder_are_refused(
    folder: Path, tmp_path: Path, name: str
) -> None:
    file = toml(tmp_path, f'[models."{name}"]\npath = "{folder}/one"\n')
    with pytest.raises(SettingsError, match="cannot be the name of a model"):
        specs("--config", file)


@pytest.mark.parametrize(
    "options",
    [("--nnodes", "2"), ("--disaggregation-mode", "prefill"), ("--served-model-name", "x")],
)
def test_settings_of_a_server_with_one_model_are_refused(
    folder: Path, options: tuple[str, ...]
) -> None:
    with pytest.raises(SettingsError, match=r"(cannot have|with one model)"):
        specs(folder / "one", folder / "two", *options)


def test_a_folder_offers_folders_and_gguf_files_by_their_names(folder: Path) -> None:
    (folder / "small.Q4_0.gguf").write_bytes(b"GGUF")
    (folder / "big-00001-of-00002.gguf").write_bytes(b"GGUF")
    (folder / "big-00002-of-00002.gguf").write_bytes(b"GGUF")
    (folder / "notes").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "linked").symlink_to(folder / "one")
    (folder / "nowhere").symlink_to(folder / "gone")
    (folder / "readme.txt").write_text("x")
    found = from_folder(read("--models-dir", folder), str(folder))
    assert [one.name for one in found] == ["big", "linked", "one", "small.Q4_0", "two"]
    assert not any(one.on_start for one in found)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--models-dir is '.*gone', which cannot be read"):
        specs("--models-dir", tmp_path / "gone")


def test_a_table_names_a_model_of_the_folder_anew(folder: Path, tmp_path: Path) -> None:
    file = toml(tmp_path, f'[models.one]\npath = "{folder}/one"\npin = true\n')
    found = specs("--config", file, "--models-dir", folder)
    assert [(one.name, one.pin) for one in found] == [("one", True), ("two", False)]


def test_the_store_is_offered_by_the_names_that_weft_list_shows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--real" / "snapshots" / "c0ffee"
    write_tiny_model(snapshot)
    broken = tmp_path / "hub" / "models--org--broken" / "blobs"
    broken.mkdir(parents=True)
    (broken / "aa.incomplete").write_bytes(b"x")
    settings = read(folder / "two", "--models-store", "--models-dir", folder)
    found = read_specs(settings, ModelStore(str(folder)))
    by_name = {one.name: one for one in found}
    assert {"one", "two", "org/real", "weft-nano"} <= set(by_name)
    assert "org/broken" not in by_name, "its pull was ended"
    assert by_name["org/real"].engine.model == str(snapshot)
    assert (by_name["org/real"].in_folder, by_name["org/real"].on_start) == (True, False)
    assert (by_name["two"].in_folder, found[0].name) == (False, "two"), "the settings name it"
    assert "org/real" not in {one.name for one in specs("--models-dir", folder)}


EVENTS = '{"publisher": "zmq", "endpoint": "%s", "replay_endpoint": "tcp://*:%d"}'


def test_two_models_do_not_publish_events_at_one_address(folder: Path, tmp_path: Path) -> None:
    for endpoint, claimed in (
        ("tcp://*:5557", r"tcp://\*:5557"),
        ("tcp://router:5557", r"tcp://router:5557 \(topic '', rank 0\)"),
    ):
        events = ("--kv-events-config", EVENTS % (endpoint, 5558))
        with pytest.raises(SettingsError, match=f"'one' and 'two' would both .* {claimed}; "):
            specs(folder / "one", folder / "two", *events)
        with pytest.raises(SettingsError, match="that comes later and another one would both"):
            specs("--models-dir", tmp_path, *events)
    text = f"""
        [models.fast]
        path = "{folder / "one"}"
        kv_events_config = '{EVENTS % ("tcp://*:5557", 5559)}'
        dp_size = 2
        [models.slow]
        path = "{folder / "two"}"
        kv_events_config = '{EVENTS % ("tcp://*:%d", 5561)}'
        [models.quiet]
        path = "{folder / "two"}"
        """
    with pytest.raises(SettingsError, match=r"'fast' and 'slow' would both .* tcp://\*:5558; "):
        specs("--config", toml(tmp_path, text % 5558))
    assert len(specs("--config", toml(tmp_path, text % 5562))) == 3
