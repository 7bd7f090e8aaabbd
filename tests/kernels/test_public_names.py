"""The public names of the ops, and the shared code that memjax may use."""

import ast
from pathlib import Path

import pytest

import memjax_kernels

#: Those whose state is a matrix for each head, `MatrixState`.
LINEAR = ("linear_attention", "ssd", "gla", "delta_rule", "gated_delta_rule")
LINEAR += ("kda", "gdn2")
SCANS = ("gated_scan", "selective_scan")
OPS = (*LINEAR, *SCANS, "gated_slots", "ttt_linear", "trellis", "lattice")
#: Modules below `_src` that memjax imports; names of ops come from `memjax_kernels`.
SHARED = {
    *("causal_attention", "causal_attention.blocks"),
    *("cached_attention", "hippo", "lattice.sphere", "trellis.functions"),
    "trellis.pallas_tpu",
    *("common", "common.cpu", "common.steps.in_place", "common.packs.tiles"),
    *("common.partition", "common.steps"),
    *("grouped_product", "recurrent_block", "stored_product"),
}


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_step_an_empty_memory_and_a_state_type(op):
    for name in (op, f"{op}_step", f"{op}_init_state"):
        assert callable(getattr(memjax_kernels, name))
        assert name in memjax_kernels.__all__
    states = {name.lower() for name in memjax_kernels.__all__ if "State" in name}
    assert op in LINEAR or f"{op.replace('_', '')}state" in states
    assert {"matrixstate", "hippostate"} <= states


def test_no_public_name_shadows_a_module():
    package = Path(memjax_kernels.__file__).parent
    modules = {path.stem for path in package.iterdir()}
    assert not modules & set(memjax_kernels.__all__)
    public = {name for name in vars(memjax_kernels) if name[0] != "_"}
    # The import hook that checks annotations leaves its own name.
    assert public - {"jaxtyping"} == set(memjax_kernels.__all__)


def test_memjax_imports_ops_by_their_public_names():
    used = set()
    for path in (Path(__file__).parents[2] / "memjax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = f"{node.module}.".partition("memjax_kernels._src.")[2]
                used |= {module.rstrip(".")} - {""}
                if node.module == "memjax_kernels._src":
                    used |= {alias.name for alias in node.names}
    assert used <= SHARED
