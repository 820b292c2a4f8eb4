"""Names of tensors in torch's, Transformer Engine's and Megatron's layouts: one table, read in any direction.

`{at}` is the path of the layer and `{kind}` is weight or bias. `ranks` says how the tensor is sharded: "rows" by output
features (weight and bias), "columns" by input features (weight; the bias is replicated); None: replicated. `halves`
names the next weight of a linear that may be gated: if that has half as many columns as this one has rows, this one is
two matrices, gate and up. If several rules have the same native name, the first one whose `needs`, another tensor of
that layer, exists is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..checkpoint import Placement
from ._lazy_tensor import ConversionError

LAYOUTS = ("native", "te", "megatron")
HUGGING_FACE = "hugging_face"  # written only


@dataclass(frozen=True)
class NameRule:
    native: str
    te: str | None = None
    megatron: str | None = None
    ranks: str | None = None
    halves: str | None = None
    needs: str | None = None

    @cached_property
    def patterns(self) -> dict[str, re.Pattern[str]]:
        return {layout: name_pattern(name) for layout in LAYOUTS if (name := getattr(self, layout)) is not None}

    def placement(self, kind: str | None, halves: int = 1) -> Placement | None:
        """Returns how the tensor is sharded; None: replicated."""
        if self.ranks == "rows":
            return Placement(0, halves)
        return Placement(1) if self.ranks == "columns" and kind != "bias" else None


def name_pattern(name: str) -> re.Pattern[str]:
    """Compiles a name with {at}, {kind} and {layer} to a regular expression."""
    fields = {"at": r"(?P<at>(?:.*\.)?)", "kind": "(?P<kind>weight|bias)", "layer": r"(?P<layer>\d+)"}
    unknown = set(re.findall(r"\{(\w*)\}", name)) - set(fields)
    if unknown:
        raise ConversionError(f"name {name!r} has {{{unknown.pop()}}}, expected {{at}}, {{kind}} or {{layer}}")
    parts = re.split(r"\{(\w+)\}", name)
    return re.compile("".join(fields[part] if i % 2 else re.escape(part) for i, part in enumerate(parts)))


A, C = "{at}self_attention.", "{at}cross_attention."
QKV, FC1, FC2 = A + "linear_qkv.", "{at}mlp.linear_fc1.", "{at}mlp.linear_fc2."
TE_QKV, TE_MLP, TE_CROSS = A + "layernorm_qkv.", "{at}layernorm_mlp.", "{at}inter_attention."

RULES = (
    NameRule("{at}input_norm.{kind}", TE_QKV + "layer_norm_{kind}", QKV + "layer_norm_{kind}", needs=A + "qkv.weight"),
    NameRule("{at}input_norm.{kind}", TE_QKV + "layer_norm_{kind}", "{at}input_layernorm.{kind}"),
    NameRule(A + "qkv.{kind}", TE_QKV + "{kind}", QKV + "{kind}", "rows", needs="{at}input_norm.weight"),
    NameRule(A + "qkv.{kind}", A + "qkv.{kind}", QKV + "{kind}", "rows"),
    NameRule(A + "q.{kind}", TE_QKV + "query_{kind}", None, "rows", needs="{at}input_norm.weight"),
    NameRule(A + "k.{kind}", TE_QKV + "key_{kind}", None, "rows", needs="{at}input_norm.weight"),
    NameRule(A + "v.{kind}", TE_QKV + "value_{kind}", None, "rows", needs="{at}input_norm.weight"),
    NameRule(A + "q.{kind}", A + "qkv.query_{kind}", None, "rows"),
    NameRule(A + "k.{kind}", A + "qkv.key_{kind}", None, "rows"),
    NameRule(A + "v.{kind}", A + "qkv.value_{kind}", None, "rows"),
    NameRule(A + "qkv._extra_state", TE_QKV + "_extra_state", QKV + "_extra_state", needs="{at}input_norm.weight"),
    NameRule(A + "qkv._extra_state", A + "qkv._extra_state", QKV + "_extra_state"),
    NameRule(A + "q_norm.{kind}", A + "q_norm.{kind}", A + "q_layernorm.{kind}"),
    NameRule(A + "k_norm.{kind}", A + "k_norm.{kind}", A + "k_layernorm.{kind}"),
    NameRule(A + "core_attention._extra_state", A + "core_attention._extra_state", A + "core_attention._extra_state"),
    NameRule(A + "proj.{kind}", A + "proj.{kind}", A + "linear_proj.{kind}", "columns"),
    NameRule(A + "proj._extra_state", A + "proj._extra_state", A + "linear_proj._extra_state"),
    NameRule(
        "{at}cross_norm.{kind}", TE_CROSS + "layernorm_query.layer_norm_{kind}", "{at}pre_cross_attn_layernorm.{kind}"
    ),
    NameRule(C + "q.{kind}", TE_CROSS + "layernorm_query.query_{kind}", C + "linear_q.{kind}", "rows"),
    NameRule(C + "q.{kind}", TE_CROSS + "layernorm_query.{kind}", None, "rows"),
    NameRule(C + "q._extra_state", TE_CROSS + "layernorm_query._extra_state", C + "linear_q._extra_state"),
    NameRule(C + "kv.{kind}", TE_CROSS + "key_value.{kind}", C + "linear_kv.{kind}", "rows"),
    NameRule(C + "k.{kind}", TE_CROSS + "key_value.key_{kind}", None, "rows"),
    NameRule(C + "v.{kind}", TE_CROSS + "key_value.value_{kind}", None, "rows"),
    NameRule(C + "kv._extra_state", TE_CROSS + "key_value._extra_state", C + "linear_kv._extra_state"),
    NameRule(C + "proj.{kind}", TE_CROSS + "proj.{kind}", C + "linear_proj.{kind}", "columns"),
    NameRule(C + "proj._extra_state", TE_CROSS + "proj._extra_state", C + "linear_proj._extra_state"),
    NameRule(
        "{at}mlp_norm.{kind}", TE_MLP + "layer_norm_{kind}", FC1 + "layer_norm_{kind}", needs="{at}mlp.fc1.weight"
    ),
    NameRule("{at}mlp_norm.{kind}", TE_MLP + "layer_norm_{kind}", "{at}pre_mlp_layernorm.{kind}"),
    NameRule("{at}mlp.fc1.{kind}", TE_MLP + "fc1_{kind}", FC1 + "{kind}", "rows", halves="{at}mlp.fc2.weight"),
    NameRule("{at}mlp.fc2.{kind}", TE_MLP + "fc2_{kind}", FC2 + "{kind}", "columns"),
    NameRule("{at}mlp._extra_state", TE_MLP + "_extra_state", None),  # one for both linears
    NameRule("{at}mlp.fc1._extra_state", None, FC1 + "_extra_state"),
    NameRule("{at}mlp.fc2._extra_state", None, FC2 + "_extra_state"),
    NameRule("{at}output_norm.{kind}", "{at}layernorm.{kind}", None),
    NameRule("embedding.weight", "embedding.weight", "embedding.word_embeddings.weight", "rows"),
    NameRule("position_embedding.weight", "position_embedding.weight", "embedding.position_embeddings.weight"),
    NameRule("final_norm.{kind}", "final_norm.{kind}", "decoder.final_layernorm.{kind}"),
    NameRule("final_norm._extra_state", "final_norm._extra_state", "decoder.final_layernorm._extra_state"),
    NameRule("output.{kind}", "output.{kind}", "output_layer.{kind}", "rows"),
)
# Paths of layers. Megatron's distributed checkpoints omit {layer} and stack the layers in the first dimension.
PATHS = (
    NameRule("layers.{layer}.", "layers.{layer}.", "decoder.layers.{layer}."),
    NameRule("encoder.layers.{layer}.", "encoder.layers.{layer}.", "encoder.layers.{layer}."),
)


@dataclass(frozen=True)
class NameMatch:
    """A matched name: its native name, the rule, and the values of {at} and {kind}."""

    native: str
    rule: NameRule | None = None
    at: str = ""
    kind: str | None = None


@dataclass(frozen=True)
class NameTable:
    """The rules, those of the user first."""

    rules: tuple[NameRule, ...] = RULES
    paths: tuple[NameRule, ...] = PATHS

    def layout_of(self, names: Iterable[str]) -> str:
        """Returns the layout in which most names match a rule; native if none does."""
        names = list(names)
        counts = {layout: sum(self.match(name, layout).rule is not None for name in names) for layout in LAYOUTS}
        return max(LAYOUTS, key=lambda layout: counts[layout])

    def match(self, name: str, layout: str) -> NameMatch:
        """Finds the native name of a name in `layout`. Without a rule only the path of the layer is translated."""
        for rule in self.rules:
            if layout in rule.patterns and (found := rule.patterns[layout].fullmatch(name)):
                fields: dict[str, Any] = {"at": "", "kind": None} | found.groupdict()
                fields["at"] = self.map_path(fields["at"], layout, "native")
                return NameMatch(rule.native.format(**fields), rule, fields["at"], fields["kind"])
        return NameMatch(self.map_path(name, layout, "native"))

    def target_name(self, native: str, layout: str, present: Container[str]) -> str | None:
        """Returns the name in `layout` of a native name, given all native names `present`; None if it has none."""
        unmapped = False
        for rule in self.rules:
            if not (found := rule.patterns["native"].fullmatch(native)):
                continue
            fields = {"at": ""} | found.groupdict()
            if rule.needs and rule.needs.format(**fields) not in present:
                continue
            if (name := getattr(rule, layout)) is not None:
                fields["at"] = self.map_path(fields["at"], "native", layout)
                return str(name.format(**fields))
            unmapped = True
        return None if unmapped else self.map_path(native, "native", layout)

    def map_path(self, name: str, source: str, target: str) -> str:
        """Translates the path of the layer at the start of a name from one layout to another."""
        for rule in self.paths:
            if source in rule.patterns and (found := rule.patterns[source].match(name)):
                return (getattr(rule, target) or found[0]).format(**found.groupdict()) + name[found.end() :]
        return name

    def stacks(self) -> list[str]:
        """Returns the paths of Megatron's layers without their number: "decoder.layers."."""
        return [rule.megatron.replace("{layer}.", "") for rule in self.paths if rule.megatron]

    def as_json(self) -> str:
        rows = {"rules": [asdict(rule) for rule in self.rules], "paths": [asdict(rule) for rule in self.paths]}
        lines = (f' "{key}": [\n  ' + ",\n  ".join(map(json.dumps, row)) + "\n ]" for key, row in rows.items())
        return "{\n" + ",\n".join(lines) + "\n}"


def read_names(path: Path | str | None) -> NameTable:
    """Reads rules that take precedence over the table from a JSON file, in the form of ``torchweft convert names``."""
    if path is None:
        return NameTable()
    try:
        given = json.loads(Path(path).read_text())
        rules, paths = ([NameRule(**row) for row in given.get(key, ())] for key in ("rules", "paths"))
        for rule in (*rules, *paths):
            if rule.ranks not in (None, "rows", "columns"):
                raise ValueError(f"ranks is {rule.ranks!r}, expected null, 'rows' or 'columns'")
            rule.patterns  # noqa: B018  (raises for unknown fields)
    except (OSError, TypeError, AttributeError, ValueError) as error:
        raise ConversionError(
            f"{path}: {error}. Expected {{'rules': […], 'paths': […]}}, as `python -m torchweft.convert names` prints"
        ) from error
    return NameTable((*rules, *RULES), (*paths, *PATHS))
