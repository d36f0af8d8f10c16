"""Which files of a repository make a model, and which of several GGUF types fits this machine."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence, Set
from pathlib import PurePosixPath
from typing import NamedTuple

from weft.config.amounts import size
from weft.weights.gguf.files import encoder_beside, first_of_each, is_gguf, is_of_kind, stem
from weft.weights.pull.listing import HubFile, Listing, PullError
from weft.weights.pull.names import HubName

# Neither code nor pickles.
DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
HUB_FILES = ("*.safetensors", *DESCRIPTIONS)
# Copies of the weights in formats of their makers' own programs.
COPIES = ("consolidated*", "original/*", "metal/*")
# Types that a file's name may end with, in the order in which one is taken: the best that is still
# fast, then larger ones, then those that lose more.
PREFERRED = (
    *("Q4_K_M", "Q4_K_S", "Q4_K", "MXFP4", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0"),
    *("Q5_K_M", "Q5_K_S", "Q5_K", "Q5_1", "Q5_0", "Q6_K", "Q8_0", "BF16", "F16", "F32"),
    *(
        "Q3_K_L",
        "Q3_K_M",
        "Q3_K_S",
        "Q3_K",
        "IQ3_M",
        "IQ3_S",
        "IQ3_XS",
        "IQ3_XXS",
        "Q2_K",
        "Q2_K_S",
    ),
    *("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
_TYPE = re.compile(r"(?:^|[-._])((?:I?Q[1-8]|TQ[12]|MXFP4|BF16|F16|F32)[A-Z0-9_]*)$", re.IGNORECASE)
# Types that weft reads, with any suffix: Q4_K_M, Q4_K_XL.
_READ = re.compile(
    r"(Q[2-6]_K|Q[45]_[01]|Q8_0|IQ1_[SM]|IQ2_(XXS|XS|S|M)|IQ3_(XXS|XS|S|M)|IQ4_(NL|XS)"
    r"|TQ[12]_0|MXFP4|BF16|F16|F32)"
)
WORK_BYTES = 500_000_000  # the program, and a context of usual length
WORK_PART = 0.1  # of the weights, for what is computed


# By the beginning of a type, how many times its bytes of the file weights take in memory, at most.
_TIMES_KEPT = {"IQ1": 2.1, "IQ2": 1.6, "IQ3": 1.4, "Q2": 1.2}


class Variant(NamedTuple):
    """A GGUF model among those of a repository."""

    kind: str  # "Q4_K_M"; "": its name does not say
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def is_read(self) -> bool:
        """Whether weft reads this type."""
        return _READ.match(self.kind) is not None

    @property
    def rank(self) -> int:
        """The index among `PREFERRED`; others come last."""
        return PREFERRED.index(self.kind) if self.kind in PREFERRED else len(PREFERRED)

    def fits(self, free_bytes: int) -> bool:
        times = [times for kind, times in _TIMES_KEPT.items() if self.kind.startswith(kind)]
        return fits(int(self.num_bytes * max(times, default=1)), free_bytes)


def fits(num_bytes: int, free_bytes: int) -> bool:
    """Whether a model with weights of this size can be served in this memory."""
    return num_bytes * (1 + WORK_PART) + WORK_BYTES <= free_bytes


def variants(files: Sequence[HubFile]) -> list[Variant]:
    """The GGUF models of a repository, the smallest first."""
    found: dict[str, list[HubFile]] = {}
    for file in files:
        path = PurePosixPath(file.path)
        if is_gguf(path) and first_of_each([path]):
            found.setdefault(str(path.with_name(stem(path))), []).append(file)
    listed = [Variant(kind_of(name), tuple(parts)) for name, parts in found.items()]
    return sorted(listed, key=lambda one: one.num_bytes)


def kind_of(name: str) -> str:
    """The type of weights that the name of a GGUF model ends with; "": it does not say."""
    match = _TYPE.search(name)
    return match[1].upper() if match else ""


def chosen_files(
    listing: Listing, name: HubName, free_bytes: int, here: Set[str] = frozenset()
) -> tuple[HubName, list[HubFile]]:
    """The files of the model with this name, and its name with the type that was chosen: one that
    is here already (`here`: etags), or the best that fits. Raises PullError."""
    if name.file:
        return name, _with_others(_of_file(listing, name), listing)
    found = variants(listing.files)
    has_safetensors = any(_matches(file, ("*.safetensors",)) for file in listing.files)
    if not name.kind and (has_safetensors or not found):
        return name, matching(listing, HUB_FILES)
    if name.kind:
        of_kind = [
            one for one in found if is_of_kind(stem(PurePosixPath(one.files[0].path)), name.kind)
        ]
        if not of_kind:
            kinds = ", ".join(one.kind for one in found if one.kind) or "none"
            raise PullError(
                f"{name.repo} has no GGUF file of type {name.kind}; its types are {kinds}"
            )
        if len(of_kind) > 1:
            paths = ", ".join(one.files[0].path for one in of_kind[:8])
            raise PullError(f"{name} are several models; name a file: {paths}")
        return name, _with_others(of_kind[0].files, listing)
    fetched = [one for one in found if all(file.etag in here for file in one.files)]
    best = preferred(fetched, free_bytes) or preferred(found, free_bytes)
    if best is None:
        raise PullError(
            f"no GGUF file of {name.repo} can be served here: {table(found, free_bytes)}"
        )
    return name._replace(kind=best.kind), _with_others(best.files, listing)


def preferred(found: Sequence[Variant], free_bytes: int) -> Variant | None:
    """The one to take if the user names none: None if none fits."""
    fitting = [one for one in found if one.is_read and one.fits(free_bytes)]
    return min(fitting, key=lambda one: one.rank, default=None)


def table(found: Sequence[Variant], free_bytes: int) -> str:
    """The types of a repository, and which of them can be served here, on one line."""
    return ", ".join(f"{one.kind or '?'} {verdict(one, free_bytes)}" for one in found)


def verdict(one: Variant, free_bytes: int) -> str:
    if not one.is_read:
        return f"({size(one.num_bytes)}) is of a type that weft does not read"
    return f"({size(one.num_bytes)}) {'fits' if one.fits(free_bytes) else 'does not fit'}"


def _with_others(files: Sequence[HubFile], listing: Listing) -> list[HubFile]:
    """The files of a GGUF model, that of its encoder of pictures, and those that describe it."""
    path = PurePosixPath(files[0].path)
    beside = {
        other: file
        for file in listing.files
        if (other := PurePosixPath(file.path)).parent == path.parent
    }
    encoder = encoder_beside(path, beside)
    found = [*files] if encoder is None else [*files, beside[encoder]]
    return [*found, *described(listing)]


def described(listing: Listing) -> list[HubFile]:
    """The files that describe a model."""
    return matching(listing, DESCRIPTIONS)


def matching(listing: Listing, patterns: Sequence[str]) -> list[HubFile]:
    """The files that match, without copies of the weights."""
    found = [file for file in listing.files if _matches(file, patterns)]
    return [file for file in found if not _matches(file, COPIES)]


def _of_file(listing: Listing, name: HubName) -> list[HubFile]:
    """The file with this path, and the other parts of its model. Raises PullError."""
    path = PurePosixPath(name.file)
    for one in variants(listing.files):
        if any(file.path == name.file for file in one.files):
            return list(one.files)
    near = ", ".join(one.files[0].path for one in variants(listing.files)[:8]) or "none"
    raise PullError(f"{name.repo} has no file {path}; its GGUF files are {near}")


def _matches(file: HubFile, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)
