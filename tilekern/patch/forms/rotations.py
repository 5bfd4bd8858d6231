# Copyright (C) 2026 THL A29 Limited, a Tencent company and the HuggingFace Inc. team; Copyright (c) 2025 Baidu, Inc.
# and HuggingFace Inc. team; Copyright 2022 EleutherAI and the HuggingFace Inc. team; Copyright 2022 Salesforce authors,
# The EleutherAI, and HuggingFace Teams; Copyright 2024 Cohere team; Copyright 2024 IBM and the HuggingFace Inc. team;
# Copyright 2024 Microsoft and the HuggingFace Inc. team; Copyright 2024 The GLM & ZhipuAI team and HuggingFace Inc.
# team; Copyright 2024 The Kyutai and HuggingFace Inc. teams; Copyright 2024 The Qwen team, Alibaba Group and the
# HuggingFace Inc. team; Copyright 2025 Baidu and HuggingFace Inc. team; Copyright 2025 HuggingFace Inc. team; Copyright
# 2025 Meituan and the HuggingFace Inc. team; Copyright 2025 The HuggingFace Inc. team; Copyright 2025 The HuggingFace
# Team; Copyright 2025 The LLAMA4 and HuggingFace Inc. team; Copyright 2025 The PaddlePaddle Team and The HuggingFace
# Inc. team; Copyright 2025 The ZhipuAI Inc. team and HuggingFace Inc. team; Copyright 2026 Reflection AI and the
# HuggingFace Inc. team; Copyright 2026 The Dots Studio team and the HuggingFace Inc. team; Copyright 2026 The
# HuggingFace Inc. team; Copyright 2026 the HuggingFace Team.
#
# Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with the License.
# You may obtain a copy of it at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""Rotations of queries and keys, and the functions that they call.

Quoted from transformers without docstrings, annotations and decorators; never imported.
"""

def llama_rotate_half(x):
    x1 = x[..., :x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]
    return torch.cat((-x2, x1), dim=-1)

def deepseek_v4_rotate_half(x):
    x1 = x[..., 0::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)

def cohere_rotate_half(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    rot_x = torch.stack([-x2, x1], dim=-1).flatten(-2)
    return rot_x

def nanochat_rotate_half(x):
    x1 = x[..., :x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2:]
    return torch.cat((x2, -x1), dim=-1)

def gpt_oss_apply_rotary_emb(x, cos, sin):
    first_half, second_half = torch.chunk(x, 2, dim=-1)
    first_ = first_half * cos - second_half * sin
    second_ = second_half * cos + first_half * sin
    return torch.cat((first_, second_), dim=-1)

def llama_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed, k_embed)

def paddleocr_vl_apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    mrope_section = mrope_section * 2
    cos = torch.cat([m[i % 3] for i, m in enumerate(cos.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    sin = torch.cat([m[i % 3] for i, m in enumerate(sin.split(mrope_section, dim=-1))], dim=-1).unsqueeze(unsqueeze_dim)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed, k_embed)

def beam_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    q_type, k_type = (q.dtype, k.dtype)
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed.to(q_type), k_embed.to(k_type))

def hunyuan_vl_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    origin_dtype = q.dtype
    q, k = (q.float(), k.float())
    cos = cos.unsqueeze(unsqueeze_dim).float()
    sin = sin.unsqueeze(unsqueeze_dim).float()
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed.to(origin_dtype), k_embed.to(origin_dtype))

def gemma4_apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return x * cos + rotate_half(x) * sin

def bamba_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])
    k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])
    q_embed = q_rot * cos + rotate_half(q_rot) * sin
    k_embed = k_rot * cos + rotate_half(k_rot) * sin
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return (q_embed, k_embed)

def phi3_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])
    k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])
    q_embed = torch.cat([q_rot * cos + rotate_half(q_rot) * sin, q_pass], dim=-1)
    k_embed = torch.cat([k_rot * cos + rotate_half(k_rot) * sin, k_pass], dim=-1)
    return (q_embed, k_embed)

def dots3_note_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rot_dim = cos.shape[-1]
    q, q_pass = (q[..., :rot_dim], q[..., rot_dim:])
    k, k_pass = (k[..., :rot_dim], k[..., rot_dim:])
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (torch.cat((q_embed, q_pass), dim=-1), torch.cat((k_embed, k_pass), dim=-1))

def glm_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    cos = cos[..., :cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., :sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])
    k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])
    q_embed = q_rot * cos + rotate_half(q_rot) * sin
    k_embed = k_rot * cos + rotate_half(k_rot) * sin
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return (q_embed, k_embed)

def glm4v_5_0_0_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    cos = cos[..., :cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., :sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])
    k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])
    q_embed = q_rot * cos + rotate_half_llm(q_rot) * sin
    k_embed = k_rot * cos + rotate_half_llm(k_rot) * sin
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return (q_embed, k_embed)

def helium_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    cos = cos[..., :cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., :sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed, k_embed)

def ernie4_5_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    original_dtype = q.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    cos = cos[..., :cos.shape[-1] // 2].repeat_interleave(2, dim=-1)
    sin = sin[..., :sin.shape[-1] // 2].repeat_interleave(2, dim=-1)
    q_embed = q.float() * cos + rotate_half(q).float() * sin
    k_embed = k.float() * cos + rotate_half(k).float() * sin
    return (q_embed.to(original_dtype), k_embed.to(original_dtype))

def deepseek_v3_apply_rotary_pos_emb_interleave(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos[..., :cos.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    sin = sin[..., :sin.shape[-1] // 2].unsqueeze(unsqueeze_dim)
    q1, q2 = (q[..., 0::2], q[..., 1::2])
    k1, k2 = (k[..., 0::2], k[..., 1::2])
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    return (q_embed, k_embed)

def longcat_flash_apply_rotary_pos_emb_interleave(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    b, h, s, d = q.shape
    q = q.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    b, h, s, d = k.shape
    k = k.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed, k_embed)

def cohere_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    dtype = q.dtype
    q = q.float()
    k = k.float()
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    return (q_embed.to(dtype=dtype), k_embed.to(dtype=dtype))

def ernie4_5_vl_moe_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    original_dtype = q.dtype
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = q.float() * cos + rotate_half_text(q).float() * sin
    k_embed = k.float() * cos + rotate_half_text(k).float() * sin
    return (q_embed.to(original_dtype), k_embed.to(original_dtype))

def glm4v_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = (q[..., :rotary_dim], q[..., rotary_dim:])
    k_rot, k_pass = (k[..., :rotary_dim], k[..., rotary_dim:])
    q_embed = q_rot * cos + rotate_half_llm(q_rot) * sin
    k_embed = k_rot * cos + rotate_half_llm(k_rot) * sin
    q_embed = torch.cat([q_embed, q_pass], dim=-1)
    k_embed = torch.cat([k_embed, k_pass], dim=-1)
    return (q_embed, k_embed)

def gpt_oss_apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = _apply_rotary_emb(q, cos, sin)
    k_embed = _apply_rotary_emb(k, cos, sin)
    return (q_embed, k_embed)

def gpt_oss_5_0_0_apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = _apply_rotary_emb(q, cos, sin)
    k_embed = _apply_rotary_emb(k, cos, sin)
    return (q_embed, k_embed)

def qwen2_vl_apply_rotary_pos_emb_vision(q, k, cos, sin):
    orig_q_dtype = q.dtype
    orig_k_dtype = k.dtype
    q, k = (q.float(), k.float())
    cos, sin = (cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float())
    q_embed = q * cos + rotate_half(q) * sin
    k_embed = k * cos + rotate_half(k) * sin
    q_embed = q_embed.to(orig_q_dtype)
    k_embed = k_embed.to(orig_k_dtype)
    return (q_embed, k_embed)

def llama4_apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    xq_out = torch.view_as_real(xq_ * freqs_cis[:, :, None, :]).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis[:, :, None, :]).flatten(3)
    return (xq_out.type_as(xq), xk_out.type_as(xk))

def deepseek_v2_apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.unsqueeze(1).to(xq_.device)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3).type_as(xq)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3).type_as(xk)
    return (xq_out, xk_out)

def llama4_vision_apply_rotary_emb(query, key, freqs_ci):
    query_ = torch.view_as_complex(query.float().reshape(*query.shape[:-1], -1, 2))
    key_ = torch.view_as_complex(key.float().reshape(*key.shape[:-1], -1, 2))
    freqs_ci = reshape_for_broadcast(freqs_ci=freqs_ci, query=query_)
    freqs_ci = freqs_ci.to(query_.device)
    query_out = torch.view_as_real(query_ * freqs_ci).flatten(3)
    key_out = torch.view_as_real(key_ * freqs_ci).flatten(3)
    return (query_out.type_as(query), key_out.type_as(key))

def llama4_reshape_for_broadcast(freqs_ci, query):
    ndim = query.ndim
    shape = [d if i == 1 or i == ndim - 1 else 1 for i, d in enumerate(query.shape)]
    return freqs_ci.view(*shape)

def codegen_apply_rotary_pos_emb(tensor, sin, cos):
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return tensor * cos + rotate_every_two(tensor) * sin

def codegen_rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(-2)
