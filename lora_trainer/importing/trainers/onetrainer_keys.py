"""The keys of OneTrainer's settings files, config version 11 (23df383) and what older versions call them.

Plain rules by flat key; what depends on several is marked and read in `onetrainer`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_trainer.importing.rules import (
    PRECISIONS,
    TOGETHER,
    Idle,
    Lacks,
    Refused,
    Rule,
    To,
    each,
    under,
    words,
)

_PROGRAM = Idle("is about that program, not about the result")
_MEMORY = Idle("the plan fits the training into memory; that never changes the result")
_CACHED = Idle("latents and text-encoder outputs are always cached, and never stale")
_SECRET = Idle("tokens stay in the environment")
_OTHER_METHOD = Idle("is of another training method")
_AUGMENTED = Lacks("images are only mirrored")

_PART = {
    "model_name": TOGETHER,
    **each("train include learning_rate weight_dtype dropout_probability guidance_scale", TOGETHER),
    **each("stop_training_after stop_training_after_unit", TOGETHER),
    "train_embedding": Idle("there are no embeddings"),
    "attention_mask": Idle("padding is masked as the base was trained"),
    **each("gradient_checkpointing offload_fraction activation_offloading", _MEMORY),
}
PARTS = [
    "unet",
    "prior",
    "transformer",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "text_encoder_4",
    "vae",
]
_OTHER_PARTS = [
    "unconditional_transformer",
    "effnet_encoder",
    "decoder",
    "decoder_text_encoder",
    "decoder_vqgan",
]
_OPTIONS = (
    "adam_w_mode alpha amsgrad beta1 beta2 beta3 bias_correction block_wise capturable centered "
    "clip_threshold d0 d_coef dampening decay_rate decouple differentiable eps eps2 foreach fsdp_in_use "
    "fused fused_back_pass growth_rate initial_accumulator_value initial_accumulator is_paged log_every "
    "lr_decay max_unorm maximize min_8bit_size quant_block_size momentum nesterov no_prox optim_bits "
    "percentile_clipping r relative_step safeguard_warmup scale_parameter stochastic_rounding "
    "use_bias_correction use_triton warmup_init weight_decay weight_lr_power decoupled_decay fixed_decay "
    "rectify degenerated_to_sgd k xi n_sma_threshold ams_bound adanorm adam_debias slice_p cautious "
    "weight_decay_by_lr prodigy_steps use_speed split_groups split_groups_mean factored factored_fp32 "
    "use_stableadamw use_cautious use_grams use_adopt d_limiter use_schedulefree use_orthograd "
    "nnmf_factor orthogonal_gradient use_atan2 use_AdEMAMix beta3_ema alpha_grad beta1_warmup min_beta1 "
    "Simplified_AdEMAMix kourkoutas_beta schedulefree_c ns_steps MuonWithAuxAdam muon_hidden_layers "
    "muon_adam_regex muon_adam_lr muon_te1_adam_lr muon_te2_adam_lr muon_adam_config rms_rescaling "
    "normuon_variant beta2_normuon low_rank_ortho ortho_rank accelerated_ns cautious_wd approx_mars "
    "auto_kappa_p compile"
)
_CARRIED = (
    "amsgrad beta1 beta2 centered d_coef eps growth_rate maximize momentum nesterov relative_step "
    "scale_parameter warmup_init weight_decay"
)
OPTIMIZER_OPTIONS = tuple(_OPTIONS.split())
CARRIED_OPTIONS = frozenset(_CARRIED.split())
"""Options of optimizers that are read; the others are how an optimizer that is not here computes."""
_EMBEDDING = (
    "uuid model_name placeholder train stop_training_after stop_training_after_unit token_count "
)
_CLOUD = (
    "enabled type file_sync create name tensorboard_tunnel sub_type gpu_type volume_size min_download "
    "remote_dir huggingface_cache_dir onetrainer_dir install_cmd install_onetrainer update_onetrainer "
    "detach_trainer run_id download_samples download_output_model download_saves download_backups "
    "download_tensorboard delete_workspace on_finish on_error on_detached_finish on_detached_error"
)
_IMAGE: Mapping[str, Rule] = {
    **each("enable_random_flip enable_resolution_override resolution_override", TOGETHER),
    "enable_crop_jitter": Idle("images are cropped at their middle here"),
    **each("enable_fixed_flip enable_random_rotate enable_fixed_rotate enable_random_brightness "
           "enable_fixed_brightness enable_random_contrast enable_fixed_contrast enable_random_saturation "
           "enable_fixed_saturation enable_random_hue enable_fixed_hue", _AUGMENTED),
    **each("random_rotate_max_angle random_brightness_max_strength random_contrast_max_strength "
           "random_saturation_max_strength random_hue_max_strength", Idle("is of what is said beside it")),
    **each("enable_random_circular_mask_shrink enable_random_mask_rotate_crop", Lacks(
        "masks are used as they are")),
}  # fmt: skip
_TEXT: Mapping[str, Rule] = {
    **each("prompt_source prompt_path enable_tag_shuffling tag_delimiter keep_tags_count "
           "tag_dropout_enable tag_dropout_mode tag_dropout_probability", TOGETHER),
    "tag_dropout_special_tags_mode": Lacks("all tags are left out alike", off=("NONE",)),
    "tag_dropout_special_tags": Lacks("all tags are left out alike"),
    "tag_dropout_special_tags_regex": Idle("is of what is said beside it"),
    "caps_randomize_enable": Lacks("letter case stays as it is written"),
    **each("caps_randomize_mode caps_randomize_probability caps_randomize_lowercase", Idle(
        "is of what is said beside it")),
}  # fmt: skip
_CONCEPT: Mapping[str, Rule] = {
    **under("image.", _IMAGE),
    **under("text.", _TEXT),
    **each("name path enabled type balancing balancing_strategy loss_weight include_subdirectories", TOGETHER),
    "seed": Idle("every draw is a function of train.seed"),
    "image_variations": Idle("every epoch draws anew"),
    "text_variations": Idle("data.caption_variants says how many texts are drawn"),
    **each("concept_stats __version", _PROGRAM),
    **each("image text", _PROGRAM),
}  # fmt: skip
_SAMPLE: Mapping[str, Rule] = {
    **each("enabled prompt negative_prompt seed diffusion_steps cfg_scale", TOGETHER),
    **each("height width frames length random_seed noise_scheduler text_encoder_1_layer_skip "
           "text_encoder_1_sequence_length text_encoder_2_layer_skip text_encoder_2_sequence_length "
           "text_encoder_3_layer_skip text_encoder_4_layer_skip transformer_attention_mask "
           "force_last_timestep sample_inpainting base_image_path mask_image_path __version", Idle(
               "samples are drawn at the base's own size with its own sampler")),
}  # fmt: skip
KEYS: Mapping[str, Rule] = {
    **each("training_method model_type base_model_name", TOGETHER),
    **each("__version debug_mode debug_dir cache_dir huggingface_cache_dir offline_mode tensorboard_expose "
           "tensorboard_always_on tensorboard_port validate_after validate_after_unit continue_last_backup "
           "prevent_overwrites include_train_config dataloader_threads train_device temp_device only_cache "
           "frames sample_image_format sample_video_format sample_audio_format samples_to_tensorboard "
           "sample_skip_first non_ema_sampling save_skip_first save_filename_prefix device_indexes "
           "fallback_train_dtype enable_autocast_cache loss_scaler vb_loss_strength", _PROGRAM),
    **each("multi_gpu gradient_reduce_precision fused_gradient_reduce async_gradient_reduce "
           "async_gradient_reduce_buffer", Idle("several GPUs: `accelerate launch -m lora_trainer`")),
    "tensorboard": To("logging.trackers", lambda on: ["tensorboard"] if on else []),
    "validation": Lacks("give data.validation_fraction, a share of the images that is held out"),
    "workspace_dir": To("output.folder"),
    "output_model_destination": TOGETHER,
    "output_dtype": To("output.precision", PRECISIONS, missing="FLOAT_32"),
    "output_model_format": TOGETHER,
    **each("async_offloading compile enable_async_offloading enable_activation_offloading "
           "layer_offload_fraction gradient_checkpointing weight_dtype", _MEMORY),
    "force_circular_padding": Lacks("images are not made seamless"),
    **each("concept_file_name concepts", TOGETHER),
    "aspect_ratio_bucketing": To("data.buckets", missing=True),
    **each("latent_caching clear_cache_before_training", _CACHED),
    **each("learning_rate_scheduler custom_learning_rate_scheduler learning_rate learning_rate_warmup_steps "
           "learning_rate_cycles learning_rate_scaler epochs batch_size gradient_accumulation_steps ema "
           "ema_decay train_dtype resolution attention_mechanism", TOGETHER),
    "scheduler_params": Lacks("is of a schedule of one's own"),
    **each("scheduler_params[].key scheduler_params[].value", Lacks("is of a schedule of one's own")),
    "learning_rate_min_factor": Lacks("the rate falls to nothing"),
    "ema_update_step_interval": Idle("the average is kept at every step"),
    **each("mse_strength mae_strength log_cosh_strength huber_strength huber_delta", TOGETHER),
    **each("loss_weight_fn loss_weight_strength", TOGETHER),
    "dropout_probability": TOGETHER,
    "clip_grad_norm": TOGETHER,
    "offset_noise_weight": To("objective.noise_offset"),
    "generalized_offset_noise": Lacks("noise offset is the same at all timesteps"),
    "perturbation_noise_weight": To("objective.input_perturbation"),
    **each("rescale_noise_scheduler_to_zero_terminal_snr force_v_prediction force_epsilon_prediction "
           "min_noising_strength max_noising_strength timestep_distribution noising_weight noising_bias "
           "timestep_shift dynamic_timestep_shifting", TOGETHER),
    **{f"{part}.{name}": rule for part in PARTS for name, rule in _PART.items()},
    **{f"{part}.{name}": _OTHER_METHOD for part in _OTHER_PARTS for name in _PART},
    **each("quantization.layer_filter quantization.layer_filter_preset quantization.layer_filter_regex "
           "quantization.cache_dir", Idle("all blocks of a quantized base are kept in the same bits")),
    "quantization.svd_dtype": Lacks("a quantized base is kept without low-rank corrections", off=("NONE",)),
    "quantization.svd_rank": Idle("is of svd_dtype"),
    **each("text_encoder_layer_skip text_encoder_2_layer_skip", TOGETHER),
    **each("text_encoder_3_layer_skip text_encoder_4_layer_skip text_encoder_sequence_length "
           "text_encoder_2_sequence_length", Idle("texts are read as the base was trained")),
    **each("masked_training unmasked_weight", TOGETHER),
    "unmasked_probability": TOGETHER,
    "normalize_masked_area_loss": TOGETHER,
    "masked_prior_preservation_weight": Lacks("see docs/masks-and-priors.md for priors"),
    "custom_conditioning_image": Refused("control images are not trained here"),
    **each("layer_filter layer_filter_preset layer_filter_regex", TOGETHER),
    "embedding_learning_rate": _OTHER_METHOD,
    "preserve_embedding_norm": _OTHER_METHOD,
    "embedding_weight_dtype": _OTHER_METHOD,
    "bundle_additional_embeddings": _OTHER_METHOD,
    **under("embedding.", each(f"{_EMBEDDING} initial_embedding_text is_output_embedding __version",
                               _OTHER_METHOD)),
    "additional_embeddings": Lacks("new words are learned with adapter.new_tokens"),
    **under("additional_embeddings[].", each(
        f"{_EMBEDDING} initial_embedding_text is_output_embedding __version", Lacks(
            "new words are learned with adapter.new_tokens", off=("*", 1)))),
    **under("cloud.", each(_CLOUD, _PROGRAM)),
    **under("secrets.", each("huggingface_token cloud.api_key cloud.id cloud.host cloud.port cloud.user "
                             "cloud.key_file cloud.password", _SECRET)),
    "peft_type": TOGETHER,
    "lora_model_name": To("train.init_from"),
    **each("lora_rank lora_alpha lora_decompose oft_block_size lokr_dim lokr_decompose_factor "
           "lokr_weight_decompose lokr_full_matrix", TOGETHER),
    "lora_decompose_norm_epsilon": Idle("norms are never divided by nothing"),
    "lora_decompose_output_axis": Idle("DoRA's norms are those of outputs"),
    "lora_weight_dtype": Idle("trained weights are kept in fp32"),
    "oft_block_share": Lacks("every block has a rotation of its own"),
    "oft_scaled": Lacks("a rotation has no scale"),
    "lokr_decompose_both": Lacks("LoKr's left factor is whole"),
    "lokr_use_tucker": Lacks("convolutions are factored in two, not in three"),
    **each("lokr_dora_on_output lokr_vec_trick", Idle("says how it is computed")),
    "optimizer.optimizer": TOGETHER,
    **under("optimizer.", each(" ".join(OPTIMIZER_OPTIONS), TOGETHER)),
    **each("sample_definition_file_name samples sample_after sample_after_unit", TOGETHER),
    **under("samples[].", _SAMPLE),
    **under("concepts[].", _CONCEPT),
    **each("backup_after backup_after_unit rolling_backup rolling_backup_count backup_before_save", Idle(
        "states for a resume are always saved")),
    **each("save_every save_every_unit save_after save_after_unit", TOGETHER),
    "lora_layers": TOGETHER,
    "lora_layer_preset": TOGETHER,
    "lora_layers_regex": TOGETHER,
    "min_snr_gamma": TOGETHER,
    "align_prop": Refused("is not trained here"),
    **each("train_unet train_text_encoder train_text_encoder_2 unet_learning_rate "
           "text_encoder_learning_rate text_encoder_2_learning_rate train_unet_epochs "
           "train_text_encoder_epochs train_text_encoder_2_epochs", TOGETHER),
    "vae_weight_dtype": _MEMORY,
    "gradient_checkpointing_method": _MEMORY,
}  # fmt: skip
"""Every key, `concepts[]` standing for each of a list."""
MODELS: Mapping[str, tuple[bool, bool]] = {
    **dict.fromkeys(("STABLE_DIFFUSION_15", "STABLE_DIFFUSION_20", "STABLE_DIFFUSION_20_BASE",
                     "STABLE_DIFFUSION_21", "STABLE_DIFFUSION_21_BASE", "STABLE_DIFFUSION_XL_10_BASE"),
                    (False, True)),
    **dict.fromkeys(("STABLE_DIFFUSION_3", "STABLE_DIFFUSION_35", "FLUX_DEV_1", "FLUX_2", "CHROMA_1", "QWEN",
                     "Z_IMAGE"), (True, False)),
}  # fmt: skip
"""Models that are trained here: by flow matching or not, and whether their text encoders can be."""
WEIGHTS = words({
    "FLOAT_8": "fp8", "INT_8": "int8", "NFLOAT_4": "nf4", "FLOAT_W8A8": "fp8", "INT_W8A8": "int8",
    "FLOAT_W8A8_COMPRESSED": "fp8", "INT_W8A8_COMPRESSED": "int8", "GGUF": "int8", "GGUF_A8_FLOAT": "fp8",
    "GGUF_A8_INT": "int8",
})  # fmt: skip
"""How a quantized base is kept."""
