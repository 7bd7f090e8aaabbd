"""The table with a row a paper: its claim, what was measured here, and at what size."""

from experiments.tables.table import Table, Tables, load, number, spread, times


def papers() -> Table:
    """One row a paper, each from its own result file."""
    rows = [_elastic(), _trellis(), _lattice(), _hmt(), _mplus()]
    header = ["paper", "what it claims", "what was measured here", "at what size"]
    sources = ["books/window8", "recurrent/trellis_ablation"]
    sources += ["recurrent/lattice_ablation", "hmt/smollm2/length"]
    sources += ["mplus/retention", "mplus/speed"]
    return Table([*header, "more"], rows, sources)


def _more(room: str) -> str:
    return f"`experiments/{room}`"


def _elastic() -> list[str]:
    result = load("books/window8")
    gain, models = result["gain"]["all"], result["models"]
    plain, memory = (number(x["beyond_window"], 2) for x in models.values())
    return [
        "Elastic Memory",
        "a compressed history lowers perplexity beyond the window",
        f"PPL beyond the window {plain} without, {memory} with the memory: "
        f"{spread(gain['nats'], gain['standard_error'], 3)} nats saved a token",
        f"{models['elastic']['parameters']:,} parameters, windows of "
        f"{result['config']['window']}, {result['steps']:,} updates",
        _more("elastic"),
    ]


def _mean(result: dict, name: str) -> str:
    (row,) = [row for row in result["perplexity"] if row["name"] == name]
    return spread(row["mean"], row["error"], 2)


def _size(result: dict) -> str:
    row = result["rows"][0]
    seeds = len(result["config"]["seeds"])
    updates = result["scale"]["steps"]
    return f"{row['parameters']:,} parameters, {updates} updates, {seeds} seeds"


def _trellis() -> list[str]:
    result = load("recurrent/trellis_ablation")
    plain, gated = _mean(result, "DeltaNet"), _mean(result, "Trellis")
    without = _mean(result, "without forget gate")
    return [
        "Trellis",
        "below DeltaNet and TTT; the forget gate helps",
        f"PPL {gated}, DeltaNet {plain}; without the forget gate {without}",
        _size(result),
        _more("recurrent"),
    ]


def _lattice() -> list[str]:
    result = load("recurrent/lattice_ablation")
    names = ("DeltaNet", "normalised projection", "ENC")
    plain, lattice, best = (_mean(result, name) for name in names)
    return [
        "Lattice",
        "writing only what is orthogonal to a slot beats DeltaNet",
        f"PPL {lattice}, its ENC form {best}, DeltaNet {plain}",
        _size(result),
        _more("recurrent"),
    ]


def _hmt() -> list[str]:
    result = load("hmt/smollm2/length")
    causal = result["scoring"]["causal"]
    last = causal["gain_over_window"]["HMT"][-1]
    by_model = causal["perplexity"]["all"]
    ours = number(by_model["HMT"][-1], 2)
    window = number(by_model["window of equal memory"][-1], 2)
    nats = spread(last["nats"], last["standard_error"], 3)
    return [
        "HMT",
        "perplexity below a window of equal memory on a pretrained model",
        f"PPL {ours}, window {window} ({nats} nats saved a token)",
        f"SmolLM2-135M, {sum(result['config']['steps'])} updates, "
        f"{result['lengths'][-1]:,} tokens",
        _more("hmt"),
    ]


def _mplus() -> list[str]:
    result = load("mplus/retention")
    at = result["distances"].index(4096)
    answers = {
        name: number(list(found["after"].values())[at]["accuracy"], 2)
        for name, found in result["methods"].items()
    }
    fast = load("mplus/speed")["rounds"][0]["implementations"]["ours"]["inject"]
    return [
        "M+",
        "facts stay known longer than with MemoryLLM",
        f"right answers 4,096 tokens later: {answers['M+']}, MemoryLLM "
        f"{answers['MemoryLLM']}, full attention {answers['full']}; injects "
        f"{times(fast['speedup']['official'])} as fast as the authors' program",
        "SmolLM2-135M, 240 updates, 16 facts",
        _more("mplus"),
    ]


TABLES: Tables = {"papers": papers}
