"""YAML to plain mappings and back, stricter than PyYAML: what people write is what they get.

A key that is given twice is refused, where PyYAML takes the last one silently. ``1e-4`` is a
number, as YAML 1.2 has it. ``12:30``, ``010`` and dates stay text instead of turning into 750, 8
and objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mpihpo.errors import ExperimentError
from mpihpo.settings import show

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$|0x[0-9a-fA-F_]+$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def read_yaml(path: Path, overrides: Iterable[str] = ()) -> dict[Any, Any]:
    """The mapping in a YAML file, with values replaced by ``a.b.c=value`` overrides.

    Raises:
        ExperimentError: ``where`` is the file's name, with the line where it is known.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ExperimentError(str(path), f"cannot be read: {error.strerror or error}") from error
    mapping = parse_yaml(text, str(path))
    if mapping is None:
        raise ExperimentError(str(path), "empty; expected the keys of an experiment")
    if not isinstance(mapping, dict):
        found = "a list" if isinstance(mapping, list) else show(mapping)
        problem = f"{found} at the top; expected the keys of an experiment"
        raise ExperimentError(str(path), problem)
    for override in overrides:
        _override(mapping, override)
    return mapping


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The plain value of one YAML document.

    Raises:
        ExperimentError: The text is no YAML, or gives a key twice.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        raise ExperimentError(f"{where}{line}", f"not valid YAML: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ExperimentError(where, f"not valid YAML: {problem}") from None
    except RecursionError:
        raise ExperimentError(where, "nested too deeply for an experiment") from None


def write_yaml(mapping: dict[str, Any]) -> str:
    """The YAML text of a plain mapping, in its order, for readers of YAML 1.1 and 1.2 alike."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    # Besides PyYAML's own rules, so that a text which either reader took for a number is quoted.
    _add_numbers(Dumper)
    return yaml.dump(mapping, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _override(mapping: dict[Any, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    *sections, last = dotted.strip().split(".")
    if not equals or not last or not all(sections):
        problem = f"{show(override)} is not possible; expected key=value, such as seed=3"
        raise ExperimentError("--set", problem)
    target = mapping
    for depth, name in enumerate(sections):
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict):
            inner = ".".join(sections[: depth + 1])
            problem = f"cannot be set; {inner} is {show(target)}, which has no keys"
            raise ExperimentError(dotted.strip(), problem)
    target[last] = parse_yaml(text, f"--set {dotted.strip()}")


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            # Here rather than in the constructor: there, merged keys look like repeated ones.
            node = super().compose_mapping_node(anchor)
            first: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if (key.tag, key.value) in first:
                    problem = (
                        f"{key.value} is given twice, first in line {first[key.tag, key.value]}"
                    )
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                first[key.tag, key.value] = line
            return node

    inherited = yaml.SafeLoader.yaml_implicit_resolvers
    replaced = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in replaced]
        for first, resolvers in inherited.items()
    }
    _add_numbers(Loader)
    return Loader


def _add_numbers(cls: Any) -> None:
    cls.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    cls.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))
