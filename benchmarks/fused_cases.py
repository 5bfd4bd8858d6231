"""Make cases whose references are written here in torch: fused ops, losses, attention and matmul.

References are in float64 if memory allows, else in float32 products of widened values. They run in chunks, which limit
a reference's temporaries to some GB.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cases import EPS, Case, Tensors, Work, angles_of, seeded
from tilekern.spec import ITEM_BYTES

ROWS_A_CHUNK = 1024


def _random(device: str, dtype: str, *shapes: tuple[int, ...], scale: float = 1.0) -> list[Any]:
    import torch

    generator = seeded(device)
    kind = getattr(torch, dtype)
    return [torch.randn(shape, device=device, dtype=kind, generator=generator) * scale for shape in shapes]


def fused_add_rms_norm_case(rows: int, columns: int, dtype: str = "bfloat16") -> Case:
    """Make the sum of residual and x and its RMSNorm; both are outputs."""
    item = ITEM_BYTES[dtype]
    matrix = rows * columns * item

    def tensors(device: str) -> Tensors:
        residual, x, dtotal, dy = _random(device, dtype, *[(rows, columns)] * 4)
        (weight,) = _random(device, dtype, (columns,))
        return Tensors((residual, x, weight), (EPS,), (dtotal, dy))

    def expected(t: Tensors) -> tuple[Any, ...]:
        from tilekern.kernels import rms_norm

        residual, x, weight = (one.detach() for one in t.inputs)
        dtotal, dy = t.slopes
        total = residual + x  # the op's definition rounds the sum to the dtype
        y = rms_norm.reference_forward(total, weight, EPS)["y"]
        gradients = rms_norm.reference_backward(dy, total, weight, EPS)
        dx = gradients["dx"] + dtotal.double()
        return total, y, dx, dx, gradients["dweight"]

    weights = columns * item
    return Case(
        op="fused_add_rms_norm", label=f"fused_add_rms_norm {rows}x{columns}", dtype=dtype, tensors=tensors,
        expected=expected, work=Work((4 * matrix + weights, 4 * matrix + 2 * weights)),
    )  # fmt: skip


def qk_norm_rope_case(
    batch: int, tokens: int, heads: int = 32, kv_heads: int = 8, head_dim: int = 128, dtype: str = "bfloat16"
) -> Case:
    """Make the RMSNorm of each head of q and k, then the rotary embedding, on projections' outputs."""
    import torch

    item = ITEM_BYTES[dtype]
    matrices = batch * tokens * (heads + kv_heads) * head_dim * item
    shared = 2 * tokens * head_dim * item

    def tensors(device: str) -> Tensors:
        sizes = [(batch, tokens, count, head_dim) for count in (heads, kv_heads)]
        q, k, dq, dk = _random(device, dtype, *sizes, *sizes)
        q_weight, k_weight = _random(device, dtype, (head_dim,), (head_dim,))
        cos, sin = angles_of(tokens, head_dim, device, q.dtype)
        return Tensors((q, k, q_weight, k_weight), (cos, sin, EPS), (dq, dk))

    def expected(t: Tensors) -> tuple[Any, ...]:
        cos, sin, eps = t.constants
        outputs, gradients = [], []
        for x, weight, slope in zip(t.inputs[:2], t.inputs[2:], t.slopes, strict=True):
            wide = [one.detach().double().requires_grad_() for one in (x, weight)]
            normal = wide[0] * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + eps) * wide[1]
            low, high = normal.chunk(2, dim=-1)
            turned = normal * cos.double().unsqueeze(2) + torch.cat((-high, low), -1) * sin.double().unsqueeze(2)
            gradients.append(torch.autograd.grad(turned, wide, slope.double()))
            outputs.append(turned.detach())
        (dq, dq_weight), (dk, dk_weight) = gradients
        return *outputs, dq, dk, dq_weight, dk_weight

    return Case(
        op="qk_norm_rope", label=f"qk_norm_rope {batch}x{tokens} {heads}+{kv_heads}x{head_dim}", dtype=dtype,
        tensors=tensors, expected=expected, work=Work((2 * matrices + shared, 3 * matrices + shared)), roundings=3,
    )  # fmt: skip


def cross_entropy_case(rows: int, vocabulary: int, dtype: str = "bfloat16") -> Case:
    """Make the mean cross entropy of logits; the gradient may overwrite them."""
    import torch

    matrix = rows * vocabulary * ITEM_BYTES[dtype]

    def tensors(device: str) -> Tensors:
        (logits,) = _random(device, dtype, (rows, vocabulary))
        target = torch.randint(0, vocabulary, (rows,), device=device, generator=seeded(device))
        return Tensors((logits,), (target,), (torch.ones((), device=device),))

    def expected(t: Tensors) -> tuple[Any, ...]:
        logits, (target,) = t.inputs[0].detach(), t.constants
        loss, gradient = 0.0, torch.empty(logits.shape, device=logits.device)
        for start in range(0, rows, ROWS_A_CHUNK):
            part = slice(start, start + ROWS_A_CHUNK)
            lost, gradient[part] = _loss_and_slope(logits[part].double(), target[part], rows)
            loss = loss + lost
        return loss, gradient

    return Case(
        op="cross_entropy", label=f"cross_entropy {rows}x{vocabulary}", dtype=dtype, tensors=tensors,
        expected=expected, work=Work((matrix, 2 * matrix)), roundings=2,
    )  # fmt: skip


def _loss_and_slope(logits: Any, target: Any, count: int) -> tuple[Any, Any]:
    """Return a chunk's share of the mean loss over ``count`` rows, and its gradient, in the dtype of the logits."""
    import torch

    lost = torch.nn.functional.cross_entropy(logits, target, reduction="sum") / count
    slope = torch.softmax(logits, -1)
    slope[torch.arange(target.shape[0], device=target.device), target] -= 1
    return lost, slope / count


def fused_linear_cross_entropy_case(rows: int, columns: int, vocabulary: int, dtype: str = "bfloat16") -> Case:
    """Make the head's matmul and the mean cross entropy of its logits; the logits are not an output."""
    import torch

    def tensors(device: str) -> Tensors:
        hidden, weight = _random(device, dtype, (rows, columns), (vocabulary, columns))
        target = torch.randint(0, vocabulary, (rows,), device=device, generator=seeded(device))
        return Tensors((hidden, weight * columns**-0.5), (target,), (torch.ones((), device=device),))

    def expected(t: Tensors) -> tuple[Any, ...]:
        (hidden, weight), (target,) = (one.detach() for one in t.inputs), t.constants
        wide = weight.float()
        loss, dhidden, dweight = 0.0, torch.empty(hidden.shape, device=hidden.device), torch.zeros_like(wide)
        for start in range(0, rows, ROWS_A_CHUNK):
            part = slice(start, start + ROWS_A_CHUNK)
            x = hidden[part].float()
            lost, slope = _loss_and_slope(x @ wide.T, target[part], rows)
            dhidden[part] = slope @ wide
            dweight += slope.T @ x
            loss = loss + lost
        return loss, dhidden, dweight

    product = 2 * rows * columns * vocabulary
    return Case(
        op="fused_linear_cross_entropy", label=f"fused_linear_cross_entropy {rows}x{columns}x{vocabulary}", dtype=dtype,
        tensors=tensors, expected=expected, work=Work(flops=(product, 2 * product)), roundings=3,
        metrics=("forward_backward",),  # most providers compute the gradients in the forward
    )  # fmt: skip


def attention_case(
    batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int = 128, dtype: str = "bfloat16"
) -> Case:
    """Make causal attention; the backward counts as five products, as usual."""
    import torch

    def tensors(device: str) -> Tensors:
        sizes = [(batch, tokens, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
        q, k, v, dout = _random(device, dtype, *sizes)
        return Tensors((q, k, v), (), (dout,))

    def expected(t: Tensors) -> tuple[Any, ...]:
        out, *gradients = [torch.zeros(x.shape, device=x.device) for x in (t.slopes[0], *t.inputs)]
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=out.device).triu(1)
        for b in range(batch):
            for head in range(heads):
                kv = head * kv_heads // heads
                one_q, one_k, one_v = (
                    x[b, :, h].detach().float() for x, h in zip(t.inputs, (head, kv, kv), strict=True)
                )
                dout = t.slopes[0][b, :, head].float()
                out[b, :, head], *slopes = _one_head(one_q, one_k, one_v, dout, hidden)
                for gradient, slope, h in zip(gradients, slopes, (head, kv, kv), strict=True):
                    gradient[b, :, h] += slope
        return out, *gradients

    product = batch * heads * tokens * tokens * head_dim  # of half the scores, a product and a sum each
    return Case(
        op="attention", label=f"attention {batch}x{tokens} {heads}+{kv_heads}x{head_dim} causal", dtype=dtype,
        tensors=tensors, expected=expected, work=Work(flops=(2 * product, 5 * product)), roundings=2,
    )  # fmt: skip


def _one_head(q: Any, k: Any, v: Any, dout: Any, hidden: Any) -> tuple[Any, ...]:
    """Return attention of one head and the gradients of q, k and v, all [tokens, head_dim]; ``hidden`` masks scores."""
    import torch

    scale = q.shape[-1] ** -0.5
    p = torch.softmax((q @ k.T * scale).masked_fill_(hidden, -torch.inf), -1)
    out = p @ v
    ds = p * (dout @ v.T - (out * dout).sum(-1, keepdim=True)) * scale
    return out, ds @ k, ds.T @ q, p.T @ dout


def linear_case(rows: int, in_features: int, out_features: int, dtype: str = "bfloat16") -> Case:
    """Make a linear layer without bias."""

    def tensors(device: str) -> Tensors:
        x, weight, dy = _random(device, dtype, (rows, in_features), (out_features, in_features), (rows, out_features))
        return Tensors((x, weight), (), (dy,))

    def expected(t: Tensors) -> tuple[Any, ...]:
        x, weight, dy = (one.detach().float() for one in (*t.inputs, *t.slopes))
        return x @ weight.T, dy @ weight, dy.T @ x

    product = 2 * rows * in_features * out_features
    return Case(
        op="linear", label=f"linear {rows}x{in_features}x{out_features}", dtype=dtype, tensors=tensors,
        expected=expected, work=Work(flops=(product, 2 * product)),
    )  # fmt: skip
