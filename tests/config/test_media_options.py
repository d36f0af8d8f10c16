from __future__ import annotations

from pathlib import Path

import pytest

from weft.config.media_options import PER_PROMPT, media_options
from weft.config.options import SettingsError
from weft.config.server import ServerConfig


def test_what_is_not_said_is_as_it_was() -> None:
    found = media_options(ServerConfig())
    assert (dict(found.per_prompt), found.hosts, found.folder) == (PER_PROMPT, frozenset(), None)


def test_numbers_of_each_kind_can_be_set() -> None:
    text = '{"image": 3, "video": {"count": 1, "num_frames": 9}, "audio": 0}'
    found = media_options(ServerConfig(limit_mm_per_prompt=text))
    assert found.per_prompt == {"image": 3, "video": 1, "audio": 0}
    found = media_options(ServerConfig(limit_mm_per_prompt='{"image": 3}'))
    assert found.per_prompt == {**PER_PROMPT, "image": 3}


def test_hosts_are_names_or_addresses_with_or_without_a_port(tmp_path: Path) -> None:
    text = "Images.example.com, cdn.example:8080 [2606:4700::1]:81"
    config = ServerConfig(allowed_media_domains=text, allowed_local_media_path=str(tmp_path))
    found = media_options(config)
    assert found.hosts == {"images.example.com", "cdn.example:8080", "2606:4700::1:81"}
    assert found.folder == tmp_path


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("limit_mm_per_prompt", "image=3", "which is not valid JSON"),
        ("limit_mm_per_prompt", "[1]", "which is not an object"),
        ("limit_mm_per_prompt", '{"imge": 1}', "did you mean image"),
        ("limit_mm_per_prompt", '{"image": -1}', "gives -1 for 'image'"),
        ("limit_mm_per_prompt", '{"image": true}', "gives True for 'image'"),
        ("limit_mm_per_prompt", '{"image": 1.5}', "gives 1.5"),
        ("limit_mm_per_prompt", '{"image": 10001}', "0 to 10,000"),
        ("allowed_media_domains", "https://x.example/", "names 'https://x.example/'"),
        ("allowed_media_domains", "*", "complete names of hosts"),
        ("allowed_media_domains", ".example.com", "complete names of hosts"),
        ("allowed_media_domains", "a@b", "complete names of hosts"),
        ("allowed_local_media_path", "/no/such/folder", "which is not a folder"),
    ],
)
def test_invalid_parts_are_refused(field: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=field.replace("_", "-")) as caught:
        media_options(ServerConfig(**{field: value}))
    assert words in str(caught.value)
