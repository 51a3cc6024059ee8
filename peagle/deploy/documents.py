"""YAML as people write it: no anchors, long texts as blocks.

Knows nothing about what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class Readable(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Readable.add_representer(str, _text)


def dump(documents: Sequence[Any]) -> str:
    return yaml.dump_all(documents, Dumper=Readable, sort_keys=False, width=120)
