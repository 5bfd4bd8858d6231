# Copyright 2022 EleutherAI and the HuggingFace Inc. team; Copyright 2024 Google Inc. HuggingFace Inc. team.
#
# Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with the License.
# You may obtain a copy of it at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""Decoder layers, whose sums and norms are fused.

Quoted from transformers without docstrings, annotations and decorators; never imported.
"""

class LlamaDecoderLayer:
    def forward(
        self, hidden_states, attention_mask=None, position_ids=None, cache=None, use_cache=False,
        position_embeddings=None, **kwargs
    ):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
            use_cache=use_cache, position_embeddings=position_embeddings, **kwargs
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states

class Gemma2DecoderLayer:
    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, position_ids=None, cache=None, **kwargs
    ):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
            position_ids=position_ids, cache=cache, **kwargs
        )
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states
