# Copyright 2025 Google Inc. HuggingFace Inc. team.
#
# Licensed under the Apache License, Version 2.0; you may not use this file except in compliance with the License.
# You may obtain a copy of it at http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on an
# "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""Embeddings whose rows are multiplied by a number.

Quoted from transformers without docstrings, annotations and decorators; never imported.
"""

class Gemma3TextScaledWordEmbedding:
    def forward(self, input_ids):
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)
