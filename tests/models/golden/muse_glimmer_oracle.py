"""Golden of a Muse Glimmer target: transformers' vision-language class with a tower of one layer, eager attention, float32."""

from golden.folders import write
from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

TEXT = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": 9, "output_multiplier": 0.6,
    "final_logit_softcapping": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 2,
    "pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4,
}  # fmt: skip


def write_all() -> dict[str, int]:
    """Writes `muse_glimmer_folder` and returns the size of its weights in bytes by name."""
    config = MuseGlimmerConfig(
        text_config=TEXT, vision_config=VISION, out_hidden_size=32, projector_hidden_size=8, attn_implementation="eager"
    )
    return write("muse_glimmer", MuseGlimmerForConditionalGeneration(config))
