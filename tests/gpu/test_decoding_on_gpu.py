"""Decoding on a GPU: attention to a cache, products of few rows, the next token; and the bits of a row alone."""

import gc
import json
import subprocess
import sys

import pytest
import tiny_families
import torch
from decoding import TEN, first_to_differ, greedy, one_by_one
from gpu_processes import clean_environment
from gpu_samples import compiled
from gpu_training import CONFIG
from transformers import AutoModelForCausalLM, Cache, GenerationConfig

import tilekern
from tilekern import ops
from tilekern.compile.toolchain import toolkit
from tilekern.kernels import spec_named
from tilekern.kernels.matmul.space import is_tile
from tilekern.ops.operation import DECLARED
from tilekern.patch.graphs import EAGER_STEPS, graphs_of
from tilekern.runtime import dispatch
from tilekern.spec.targets import here
from tilekern.tuning.verify.check import make_outputs

pytestmark = pytest.mark.gpu


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(sum(shape)))


def cached(batch, room, heads=32, kv_heads=8, head_dim=128):
    lengths = torch.linspace(1, room, batch, device="cuda").int().flip(0).contiguous()
    return drawn(batch, heads, head_dim), *(drawn(batch, kv_heads, room, head_dim) for _ in "kv"), lengths


@pytest.mark.parametrize(("batch", "room"), [(1, 4096), (3, 1000), (64, 300), (1, 1)])
@pytest.mark.parametrize("more", [{}, {"window": 100, "softcap": 30.0}])
def test_attention_to_a_cache_is_near_the_formula(batch, room, more):
    q, keys, values, lengths = cached(batch, room)
    found = ops.decode_attention(q, keys, values, lengths, **more)
    doubled = (x.double() for x in (q, keys, values))
    wide = DECLARED["decode_attention"].formula(
        *doubled, lengths, None, None, None, None, more.get("window"), more.get("softcap")
    )
    assert (found - wide).norm() / wide.norm() < 4e-3
    assert not tilekern.stats()["decode_attention"]["fallbacks"]


def test_a_sequence_has_its_bits_in_any_batch_and_cache():
    q, keys, values, lengths = cached(9, 1500)
    whole = ops.decode_attention(q, keys, values, lengths)
    for place in (0, 4, 8):
        length = int(lengths[place])
        alone = (x[place : place + 1, :, :length].contiguous() for x in (keys, values))
        one = ops.decode_attention(q[place : place + 1], *alone, lengths[place : place + 1])
        assert torch.equal(one[0], whole[place])


def test_keys_behind_padding_give_what_keys_from_the_first_on_give():
    """Not bit by bit: the two kernels are compiled apart, and only classes of bits make them agree."""
    q, keys, values, lengths = cached(6, 700)
    whole = ops.decode_attention(q, keys, values, lengths)
    starts = torch.tensor([0, 1, 63, 64, 100, 200], device="cuda").int()
    behind = [torch.full((6, 8, 900, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for mine, x in zip(behind, (keys, values), strict=True):
            mine[row, :, start : start + length] = x[row, :, :length]
    found = ops.decode_attention(q, *behind, lengths + starts, starts=starts)
    assert (found - whole).norm() / whole.norm() < 4e-3


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("on", [(), ("padded",), ("windowed",), ("sinks", "capped")], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (8, 4, 256), (64, 8, 64)])
def test_tiles_that_are_summed_apart_have_the_bits_of_training_by_one_block_and_by_one_each(
    heads, kv_heads, head_dim, on
):
    """If they have not, decoding in the invariant mode runs training's kernel."""
    training, decoding, target, seen = spec_named("attention_forward"), spec_named("decode_attention"), here(), 600
    alike, group = {"head_dim": head_dim, "dtype": "bfloat16"}, heads // kv_heads

    def flags(spec):
        return {d.name: d.name in (*on, "causal") for d in spec.dimensions if d.kind == "flag"}

    whole = training.problem(
        batch=1, queries=seen, keys=seen, heads=heads, kv_heads=kv_heads, **flags(training), **alike
    )
    given = training.inputs(whole, torch.Generator("cuda").manual_seed(0), "cuda") | {"window": 150}
    given["q"] = 4 * given["q"]
    ways = [config for config in training.space.candidates(whole, target) if config.get("apart")]
    first, *others = (compiled(training, whole, config, target)(given)["out"][0] for config in ways)
    assert all(torch.equal(other, first) for other in others)
    lengths = [1, 64, 65, 128, 129, *range(200, 595, 9), seen]
    count = len(lengths)
    problem = decoding.problem(
        kv_heads=count * kv_heads, keys=1100, page_size=1, group=group, **flags(decoding), **alike
    )
    starts = [(9 * row if "padded" in on else 0) for row in range(count)]
    inputs = decoding.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda") | {"window": 150}
    q, k, v = (given[name][0] for name in "qkv")
    inputs["q"] = torch.stack([q[length - 1].view(kv_heads, group, head_dim) for length in lengths])
    for name, x in (("keys", k), ("values", v)):
        inputs[name] = torch.full((count, kv_heads, 1100, head_dim), torch.nan, device="cuda", dtype=torch.bfloat16)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            inputs[name][row, :, start : start + length] = x[:length].transpose(0, 1)
    inputs["lengths"] = torch.tensor([a + b for a, b in zip(starts, lengths, strict=True)], device="cuda").int()
    if "padded" in on:
        inputs["starts"] = torch.tensor(starts, device="cuda").int()
    if "sinks" in on:
        inputs["sink_logits"] = given["sink_logits"].view(kv_heads, group)
    # Two groups of four warps add up a product in halves: the tuner finds that this is another class.
    ways = [
        config
        for config in decoding.space.candidates(problem.but(kv_heads=kv_heads), target)
        if config.get("apart") and config["num_worker_warps"] == 4
    ]
    assert {config["splits"] for config in ways} == {0, 1}
    for config in ways:
        splits = config["splits"]
        blocks = decoding.device(problem, config).grid(problem, target.sm_count)
        outputs = make_outputs(decoding, problem, blocks, "cuda") | {"out": torch.empty_like(inputs["q"])}
        found = compiled(decoding, problem, config, target)(inputs, outputs)
        if splits == 0:
            join = spec_named("decode_join")
            behind = join.problem(**decoding.follower.dimensions(problem, blocks))
            parts = {"parts": found["parts"], "splits": behind["splits"]}
            found = compiled(join, behind, join.default(behind, target), target)(parts)
        for row, length in enumerate(lengths):
            out = found["out"].view_as(inputs["q"])[row].flatten(0, 1)
            assert torch.equal(out, first[length - 1]), (splits, length)


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("tile_n", [64, 128])
def test_few_rows_have_the_bits_of_many(rows, tile_n):
    """Narrower tiles have instructions of their own."""
    many, few, target = spec_named("matmul"), spec_named("skinny_linear"), here()
    flags = {d.name: d.name == "b_transposed" for d in many.dimensions if d.kind == "flag"}
    whole = many.problem(rows=1000, inner=4096, columns=20480, dtype="bfloat16", **flags)
    config = many.default(whole, target)
    given = many.inputs(whole, torch.Generator("cuda").manual_seed(0), "cuda")
    right = compiled(many, whole, config, target)(given)["c"]
    flags = {d.name: False for d in few.dimensions if d.kind == "flag"}
    problem = few.problem(rows=rows, inner=4096, columns=20480, dtype="bfloat16", **flags)
    inputs = few.inputs(problem, torch.Generator("cuda").manual_seed(0), "cuda")
    inputs |= {"x": given["a"][:rows].contiguous(), "weight": given["b"]}
    alike = {"tile_n": tile_n, "tile_k": config["tile_k"]}
    chosen = next(c for c in few.space.candidates(problem, target) if is_tile(c) and alike.items() <= c.items())
    found = compiled(few, problem, chosen, target)(inputs)["y"]
    assert torch.equal(found, right[:rows])


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_rounded_gate_has_the_bits_of_its_parts(rows, kind):
    few, target = spec_named("skinny_linear"), here()
    off = {d.name: False for d in few.dimensions if d.kind == "flag"}
    layer = few.problem(rows=rows, inner=4096, columns=12288, dtype="bfloat16", **off)
    gate = layer.but(gated=True, rounded=True, **{kind: True})
    inputs = few.inputs(gate, torch.Generator("cuda").manual_seed(0), "cuda")
    config = few.default(gate, target)
    of_one = few.default(layer, target).but(tile_k=config["tile_k"])
    parts = [compiled(few, layer, of_one, target)(inputs | {"weight": inputs[name]})["y"] for name in ("weight", "up")]
    right = ops.swiglu(*parts) if kind == "silu" else ops.geglu(*parts, tanh=True)
    assert torch.equal(compiled(few, gate, config, target)(inputs)["y"], right)


def test_pages_are_read_where_the_table_says():
    q, keys, values, lengths = cached(4, 512)
    order = torch.randperm(4 * 32, device="cuda")
    table = torch.empty(4 * 32, dtype=torch.int32, device="cuda")
    table[order] = torch.arange(4 * 32, dtype=torch.int32, device="cuda")
    pages = (x.transpose(1, 2).reshape(4 * 32, 16, 8, 128)[order] for x in (keys, values))
    found = ops.decode_attention(q, *pages, lengths, table=table.view(4, 32))
    torch.testing.assert_close(found, ops.decode_attention(q, keys, values, lengths), rtol=2e-2, atol=2e-2)


def tokens_of(batch, tokens, head_dim=128):
    """New tokens with their angles, an empty cache, and the tokens' rows in it, in no order."""
    given = {name: drawn(batch, tokens, heads, head_dim) for name, heads in (("q", 32), ("k", 8), ("v", 8))}
    angles = torch.rand(1, tokens, head_dim // 2, device="cuda") * 6
    given |= {name: torch.cat((x, x), -1).bfloat16() for name, x in (("cos", angles.cos()), ("sin", angles.sin()))}
    given |= {name: torch.zeros(batch, 8, 2048, head_dim, device="cuda").bfloat16() for name in ("keys", "values")}
    return given | {"positions": torch.rand(batch, 2048, device="cuda").argsort(1)[:, :tokens].int()}


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (64, 1), (2, 1000)])
@pytest.mark.parametrize("normed", [True, False])
def test_new_tokens_in_a_cache_have_the_bits_of_training(batch, tokens, normed):
    given = tokens_of(batch, tokens)
    q, k, v, cos, sin = (given[name] for name in ("q", "k", "v", "cos", "sin"))
    weights = {"q_weight": drawn(128), "k_weight": drawn(128)} if normed else {}
    found = ops.append_to_cache(**given, **weights)
    if normed:
        q, k = ops.qk_norm_rope(q, k, *weights.values(), cos, sin)
    else:
        q, k = (x.transpose(1, 2) for x in ops.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, twice=True))
    assert torch.equal(found, q)
    rows = given["positions"].long()[:, None, :, None].expand(-1, 8, -1, 128)
    for cache, x in ((given["keys"], k), (given["values"], v)):
        assert torch.equal(cache, torch.zeros_like(cache).scatter(2, rows, x.transpose(1, 2)))
    assert not tilekern.stats()["append_to_cache"]["fallbacks"]


def test_a_graph_appends_at_the_rows_of_its_replay():
    given = tokens_of(4, 1)
    ops.append_to_cache(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.append_to_cache(**given)
    for name in ("keys", "values"):
        given[name].zero_()
    given["positions"].fill_(7)
    graph.replay()
    assert torch.equal(given["values"][:, :, 7], given["v"][:, 0])
    assert given["keys"].count_nonzero() == given["keys"][:, :, 7].count_nonzero() > 0


def test_a_graph_attends_to_the_lengths_of_its_replay():
    q, keys, values, lengths = cached(4, 2048)
    ops.decode_attention(q, keys, values, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.decode_attention(q, keys, values, lengths)
    for change in (0, -1):
        lengths += change
        graph.replay()
        assert torch.equal(out, ops.decode_attention(q, keys, values, lengths))


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize(("inner", "columns"), [(4096, 6144), (1000, 83)])
def test_products_of_few_rows_are_near_the_formula(rows, inner, columns):
    x, weight, up = drawn(rows, inner), drawn(columns, inner) * inner**-0.5, drawn(columns, inner) * inner**-0.5
    right = x.double() @ weight.double().t()
    assert (ops.linear(x, weight) - right).norm() / right.norm() < 4e-3
    gated = torch.nn.functional.silu(right) * (x.double() @ up.double().t())
    assert (ops.gated_linear(x, weight, up) - gated).norm() / gated.norm() < 4e-3
    stats = tilekern.stats()["skinny_linear"]
    assert stats["launches"]
    assert not stats["fallbacks"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [151936, 50257])
def test_the_next_token_is_that_of_the_cpu(dtype, vocabulary):
    batch = 33
    logits = 3 * drawn(batch, vocabulary, dtype=dtype)
    more = {
        "temperature": torch.linspace(0.1, 2, batch, device="cuda"), "top_k": torch.arange(batch, device="cuda").int(),
        "top_p": torch.linspace(0.1, 1, batch, device="cuda"), "min_p": torch.full((batch,), 0.01, device="cuda"),
        "seed": torch.arange(batch, device="cuda"), "positions": torch.arange(batch, device="cuda").int(),
    }  # fmt: skip
    found = ops.sample(logits, **more)
    assert torch.equal(found.cpu(), ops.sample(logits.cpu(), **{name: x.cpu() for name, x in more.items()}))
    assert torch.equal(found[5:6], ops.sample(logits[5:6], **{name: x[5:6] for name, x in more.items()}))
    assert torch.equal(ops.greedy(logits), logits.argmax(-1))
    assert tilekern.stats()["sample"]["launches"]


@pytest.mark.skipif(toolkit() is None, reason="no tile compiler is installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("vocabulary", [151936, 50257])
def test_the_likeliest_token_is_the_same_by_many_blocks(dtype, vocabulary):
    """Rows of ties, of minus infinity, and with NaN; as the engine's, they begin at multiples of 16 bytes."""
    parts, join, target = spec_named("greedy_parts"), spec_named("greedy_join"), here()
    room = torch.full((9, -(-vocabulary // 8) * 8), float("inf"), device="cuda", dtype=getattr(torch, dtype))
    logits = room[:, :vocabulary]
    logits.copy_((3 * drawn(9, vocabulary, dtype=torch.float32)).round())
    logits[1], logits[2, [70, 40000]] = float("-inf"), float("nan")
    expected = logits.cpu().float().argmax(1)
    for rows in (1, 9):
        problem = parts.problem(rows=rows, vocabulary=vocabulary, dtype=dtype)
        blocks = parts.device(problem, parts.default(problem, target)).grid(problem, target.sm_count)
        behind = join.problem(rows=rows, stretches=blocks // rows)
        for config in parts.space.candidates(problem, target):
            found = compiled(parts, problem, config, target)({"logits": logits[:rows]})
            ids = compiled(join, behind, join.default(behind, target), target)(found)["ids"]
            assert torch.equal(ids.cpu(), expected[:rows])


def tuned(folder):
    """A cache with kernels of one class for the tiny model, in training and for 1 and 5 sequences."""
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    command = [
        sys.executable, "-m", "tilekern.tune", str(config), "--tokens", "256", "--decode", "1,5", "--context", "64",
        "--invariant", "--cache-dir", str(folder / "cache"),
    ]  # fmt: skip
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "cache"


def test_a_token_has_the_same_logits_however_it_is_computed(tmp_path, monkeypatch):
    """In training, in a prompt, alone and in a batch, one by one: 0 elements differ, and nothing may vary."""
    monkeypatch.setenv("TILEKERN_CACHE_DIR", str(tuned(tmp_path)))
    dispatch.forget()
    tilekern.apply()
    try:
        from tilekern.tuning.plan.configs import config_of

        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                config_of(CONFIG, "tiny"), dtype=torch.bfloat16, attn_implementation="tilekern"
            )  # fmt: skip
        ids = torch.randint(model.config.vocab_size, (5, 60), device="cuda")
        with tilekern.invariant():
            whole = model.train()(input_ids=ids, use_cache=False).logits.detach()
            model.eval()
            with torch.no_grad():
                assert torch.equal(model(input_ids=ids[3:4, :50], use_cache=False).logits, whole[3:4, :50])
            assert first_to_differ(model, ids) == {}
            assert torch.equal(one_by_one(model, ids), whole)
            assert torch.equal(one_by_one(model, ids[:1]), whole[:1])
            assert not dispatch.varying()
    finally:
        tilekern.reset()
        dispatch.forget()


@pytest.fixture
def patched():
    tilekern.apply()
    yield
    tilekern.reset()
    dispatch.forget()


def generator(kind="qwen3", dtype=torch.float32):
    """A tiny model in float32, whose greedy tokens do not depend on who adds up first."""
    from tilekern.tuning.plan.configs import config_of

    more = {"gemma2": {"model_type": "gemma2", "sliding_window": 40}, "gpt_oss": {
        "model_type": "gpt_oss", "sliding_window": 40, "num_local_experts": 4, "num_hidden_layers": 2,
    }}.get(kind, {})  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = config_of(CONFIG | more | {"initializer_range": 0.1, "tie_word_embeddings": False}, "tiny")
        # Torch's grouped products of float32 read their offsets on the host, which no capture allows.
        experts = {"experts_implementation": "batched_mm"} if kind == "gpt_oss" else {}
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="tilekern", **experts).eval()


def greedily(**more):
    fixed = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return GenerationConfig(**fixed | more)


PROMPTS = [[1 + (7 * n + length) % 255 for n in range(length)] for length in (5, 90, 1, 33, 64)]


def alone(model, prompts=PROMPTS, **more):
    how = greedily(**more)
    return [
        model.generate(torch.tensor([ids], device="cuda"), generation_config=how)[0, len(ids) :].tolist()
        for ids in prompts
    ]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("graphs", [False, True])
def test_continuous_batching_gives_the_tokens_of_each_prompt_alone(kind, graphs):
    """In chunks, with transformers' own graphs of both its ways and without; nothing falls back in a capture."""
    from tilekern.patch import batching

    api = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")
    if not hasattr(getattr(api, batching._IS_FLASH, None), "tilekern_original"):
        pytest.skip("this transformers hands its pages over otherwise")
    from transformers import ContinuousBatchingConfig

    model = generator(kind)
    wanted, before = alone(model), tilekern.stats()
    pages = ContinuousBatchingConfig(
        page_size=16, num_blocks=64, max_batch_tokens=64, max_requests_per_batch=8, use_cuda_graph=graphs
    )  # fmt: skip
    # The second time all graphs are replayed.
    for _ in range(2):
        made = model.generate_batch(
            PROMPTS,
            generation_config=greedily(eos_token_id=-1),
            continuous_batching_config=pages,
            persistent_manager=True,
        )
        assert not any(output.error for output in made.values())
        assert [output.generated_tokens for output in made.values()] == wanted
    model.destroy_cached_continuous_batching_manager()
    after = tilekern.stats()
    for name in ("attention_forward", "decode_attention"):
        assert after[name]["fallbacks"] == before[name]["fallbacks"]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])
def test_a_compiled_static_cache_gives_the_tokens_of_a_dynamic_one(kind, recorded, monkeypatch):
    """generate compiles a step after a static cache and captures it; with a record the kernel for decoding is in it."""
    if not hasattr(Cache, "get_query_offset"):
        pytest.skip("this transformers does not tell where a query is")
    if recorded:
        monkeypatch.setattr(sys.modules["tilekern.ops.decode_attention"], "tuned_plan_for", dispatch.plan_for)
    model = generator(kind)
    wanted = alone(model, PROMPTS[3:4])
    before = tilekern.stats()["decode_attention"]["launches"]
    assert alone(model, PROMPTS[3:4], cache_implementation="static") == wanted
    assert (tilekern.stats()["decode_attention"]["launches"] > before) == recorded


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("recorded", [False, True])
def test_captured_tokens_are_those_of_eager_steps(kind, recorded, monkeypatch):
    """graphed replays a step after a static cache, with the same logits; a full window is another form."""
    if not hasattr(Cache, "get_query_offset"):
        pytest.skip("this transformers does not tell where a query is")
    if recorded:
        for home in ("decode_attention", "few_rows"):
            monkeypatch.setattr(sys.modules[f"tilekern.ops.{home}"], "tuned_plan_for", dispatch.plan_for)
    model = generator(kind, torch.bfloat16)
    ids = torch.tensor([PROMPTS[3], PROMPTS[3][::-1]], device="cuda")
    options = {"cache_implementation": "static", "max_new_tokens": 40, "output_logits": True}
    how = greedily(**options, return_dict_in_generate=True)
    eager = model.generate(ids, generation_config=how, disable_compile=True)
    model._cache = None
    tilekern.graphed(model)
    for _ in range(2):
        found = model.generate(ids, generation_config=how)
        assert torch.equal(found.sequences, eager.sequences)
        assert all(map(torch.equal, found.logits, eager.logits))
    graphs = graphs_of(model)[""]
    assert graphs.replays > 60
    assert not graphs.reasons


@pytest.mark.usefixtures("patched")
def test_caches_that_come_and_go_are_captured_each():
    """No graph can be captured into the pool of those that are gone while a workspace of cuBLAS is in it."""
    model, ids = generator("qwen3", torch.bfloat16), torch.tensor([PROMPTS[3]] * 2, device="cuda")
    how = greedily(cache_implementation="static", max_new_tokens=20)
    wanted = [model.generate(ids[:count], generation_config=how, disable_compile=True) for count in (2, 1)]
    tilekern.graphed(model)
    for count in (2, 2, 1, 2, 1, 1):
        found = model.generate(ids[:count], generation_config=how)
        assert torch.equal(found, wanted[2 - count])
        gc.collect()
    graphs = graphs_of(model)[""]
    assert not graphs.reasons
    # A call of other sizes than the last one's takes two eager steps at most.
    assert graphs.replays >= 6 * 19 - 4 * EAGER_STEPS


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("cache", ["static", None])
@pytest.mark.parametrize("is_returned", [False, True])
def test_generation_that_is_replayed_ends_where_transformers_own_does(cache, is_returned):
    """The end is read a step late, and the token of that step dropped; not where the caller gets the cache."""
    model, ids = generator("qwen3", torch.bfloat16), torch.tensor([PROMPTS[3]], device="cuda")
    options = {"cache_implementation": cache, "max_new_tokens": 40}
    whole = model.generate(ids, generation_config=greedily(**options))[0, ids.shape[1] :].tolist()
    last = next((token for place, token in enumerate(whole) if place > 6 and token not in whole[:place]), None)
    assert last is not None, "each token comes early"
    how = greedily(**options, eos_token_id=last, return_dict_in_generate=is_returned)
    wanted = model.generate(ids, generation_config=how, disable_compile=True)
    tilekern.graphed(model)
    for _ in range(2):
        found = model.generate(ids, generation_config=how)
        if is_returned:
            assert int(found.past_key_values.get_seq_length()) == int(wanted.past_key_values.get_seq_length())
        assert torch.equal(*(x.sequences if is_returned else x for x in (found, wanted)))


@pytest.mark.parametrize("tokens", [1, 9])
def test_packed_queries_attend_to_more_keys_and_nothing_behind_them(tokens):
    """As transformers pads a captured step: with rows of no sequence behind the last one, here of NaN."""
    queries = torch.tensor([0, tokens, tokens + 1, 2 * tokens + 1, 2 * tokens + 1], device="cuda").int()
    keys = torch.tensor([0, 700, 1000, 1000 + tokens, 1000 + tokens], device="cuda").int()
    q, k, v = drawn(1, 64, 32, 128), drawn(1, 1500, 8, 128), drawn(1, 1500, 8, 128)
    more = {"cu_seqlens": queries, "max_seqlen": 64, "cu_seqlens_k": keys, "max_seqlen_k": 1024}
    clean = ops.attention(q, k, v, **more)
    for x, ends in ((q, queries), (k, keys), (v, keys)):
        x[:, int(ends[-1]) :] = torch.nan
    found = ops.attention(q, k, v, **more)
    assert torch.equal(found, clean)
    assert not found[:, 2 * tokens + 1 :].any()
    for number in range(3):
        (a, b), (c, d) = (x[number : number + 2].tolist() for x in (queries, keys))
        alone = ops.attention(q[:, a:b], k[:, c:d], v[:, c:d])
        assert (found[:, a:b] - alone).norm() / alone.norm() < 4e-3


@pytest.mark.parametrize("family", TEN)
def test_ten_families_choose_256_tokens_of_their_own_code(family, monkeypatch, full_float32):
    """With the kernels for decoding, tuned or not, and in the invariant mode, where those of training decode."""
    monkeypatch.setitem(tiny_families.SIZES, "max_position_embeddings", 512)

    def outside(*given):
        return None if dispatch.is_invariant() else dispatch.plan_for(*given)

    for home in ("decode_attention", "few_rows"):
        monkeypatch.setattr(sys.modules[f"tilekern.ops.{home}"], "tuned_plan_for", outside)
    model, ids, _ = tiny_families.make(family)
    model, ids = model.cuda(), ids.cuda()
    wanted, _ = greedy(model, ids, 256)
    model.set_attn_implementation("tilekern")
    try:
        for invariant in (False, True):
            tilekern.apply(experts=True, invariant=invariant)
            assert torch.equal(greedy(model, ids, 256)[0], wanted)
        assert tilekern.stats()["decode_attention"]["launches"]
    finally:
        tilekern.reset()
