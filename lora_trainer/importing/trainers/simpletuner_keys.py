"""The keys of SimpleTuner's config.json and of its data backends, at bc8e6ab: rules by option.

Plain lists; what depends on several options is marked and read in `simpletuner`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_trainer.importing.rules import TOGETHER, Idle, Lacks, Refused, Rule, To, each, under

_SWITCHES = (
    "crepa_enabled diff2flow_enabled diffusion_blocks_config distillation_method ema_warmup_steps "
    "flow_cubic_schedule_weights flow_custom_timesteps flux_attention_masked_training flux_fast_schedule "
    "internal_guidance_enabled irepa_enabled layer_freeze_strategy layersync_enabled max_upscale_threshold "
    "maximum_image_size minimum_image_size mixflow_enabled nextlat_enabled peft_lora_target_modules "
    "pretrained_transformer_model_name_or_path pretrained_unet_model_name_or_path refiner_training "
    "scheduled_sampling_max_step_offset slider_lora_target target_downsample_size tread_config "
    "twinflow_enabled urepa_enabled xm_enabled"
)
_PROGRAM = (
    "allow_dataset_oversubscription aws_max_pool_connections checkpoints_rolling_total_limit configs_dir "
    "crop_aspect crop_style custom_tracker dataloader_prefetch dataloader_prefetch_qlen ddp_timeout "
    "debug_dataset_loader disable_benchmark disable_bucket_pruning disk_low_action disk_low_script "
    "disk_low_threshold enable_multiprocessing enable_watermark find_unused_parameters gradient_checkpointing "
    "i_know_what_i_am_doing ignore_missing_files inference_scheduler_timestep_spacing local_rank logging_dir "
    "lora_format lr_warmup_epochs machine_rank main_process_ip main_process_port max_workers "
    "merge_environment_config model_card_note model_card_private model_card_safe_for_work modelspec_comment "
    "num_eval_images num_machines num_processes override_dataset_config post_checkpoint_script "
    "post_upload_script pretrained_transformer_subfolder pretrained_unet_subfolder print_filenames "
    "print_sampler_statistics publishing_config push_checkpoints_to_hub push_to_hub_background "
    "resume_from_checkpoint same_network save_text_encoder seed_for_each_device torch_num_threads "
    "tracker_image_layout tracker_project_name tracker_run_name trust_remote_code variant webhook_config "
    "webhook_reporting_interval"
)
_MEMORY = (
    "accelerate_config accelerate_extra_args allow_tf32 attention_mechanism base_model_default_dtype "
    "checkpointing_rolling_steps checkpointing_use_tempdir context_parallel_comm_strategy "
    "context_parallel_size deepspeed_config disable_compile disable_tf32 disable_torch_compile dynamo_backend "
    "dynamo_dynamic dynamo_fullgraph dynamo_mode dynamo_use_regional_compilation ema_cpu_only ema_device "
    "ema_foreach_disable ema_update_interval ema_validation enable_chunked_feed_forward enable_group_offload "
    "feed_forward_chunk_size fsdp_activation_checkpointing fsdp_auto_wrap_policy fsdp_cpu_offload "
    "fsdp_cpu_ram_efficient_loading fsdp_enable fsdp_limit_all_gathers fsdp_reshard_after_forward "
    "fsdp_state_dict_type fsdp_transformer_layer_cls_to_wrap fsdp_version fully_unload_text_encoder "
    "fuse_optimizer fuse_qkv_projections fused_qkv_projections gradient_checkpointing_backend "
    "gradient_checkpointing_interval gradient_checkpointing_offload_attention "
    "gradient_checkpointing_offload_pin_memory_max_buckets gradient_checkpointing_offload_prefetch "
    "gradient_checkpointing_segment_stride group_offload_blocks_per_group group_offload_text_encoder "
    "group_offload_to_disk_path group_offload_type group_offload_use_stream group_offload_vae "
    "musubi_block_swap_device musubi_blocks_to_swap offload_during_save offload_during_startup "
    "offload_param_path optimizer_cpu_offload_method optimizer_offload_gradients optimizer_release_gradients "
    "quantization_config quantize_activations quantize_via ramtorch ramtorch_controlnet "
    "ramtorch_disable_extensions ramtorch_disable_sync_hooks ramtorch_target_modules ramtorch_text_encoder "
    "ramtorch_text_encoder_percent ramtorch_transformer_percent ramtorch_vae sageattention_usage "
    "sdnq_compile_mode sdnq_group_size sdnq_hadamard_group_size "
    "sdnq_use_hadamard sdnq_quantized_matmul_dtype sdnq_use_quantized_matmul "
    "sdnq_weights_dtype set_grads_to_none sla_config text_encoder_1_precision text_encoder_2_precision "
    "text_encoder_3_precision text_encoder_4_precision use_gradient_checkpointing"
)
_SAMPLES = (
    "eval_dataset_id eval_dataset_pooling eval_epoch_interval eval_loss_disable eval_steps "
    "eval_steps_interval eval_timesteps evaluation_type framerate num_validation_images "
    "pretrained_evaluation_model_name_or_path validate_after_epoch validate_after_step "
    "validation_adapter_config validation_adapter_mode validation_adapter_name validation_adapter_path "
    "validation_adapter_strength validation_audio_duration validation_audio_only "
    "validation_disable_unconditional validation_epoch_interval validation_external_background "
    "validation_external_script validation_guidance_real validation_guidance_rescale "
    "validation_guidance_skip_layers validation_guidance_skip_layers_start "
    "validation_guidance_skip_layers_stop validation_guidance_skip_scale validation_image_format "
    "validation_image_quality validation_input validation_internal_guidance_scale "
    "validation_ltx2_video_conditioning validation_lycoris_strength validation_lyrics validation_method "
    "validation_multigpu validation_no_cfg_until_timestep validation_noise_scheduler "
    "validation_num_video_frames validation_on_startup validation_preview validation_preview_steps "
    "validation_randomize validation_resolution validation_seed_source validation_stitch_input_location "
    "validation_using_datasets"
)
_FEATURES = (
    "assistant_lora_inference_strength assistant_lora_strength conditioning_multidataset_sampling "
    "crepa_adjacent_distance crepa_adjacent_tau crepa_block_index crepa_cutoff_step crepa_decay_steps "
    "crepa_drop_vae_encoder crepa_encoder crepa_encoder_frames_batch_size crepa_encoder_image_size "
    "crepa_feature_source crepa_lambda crepa_lambda_end crepa_normalize_by_frames "
    "crepa_normalize_neighbour_sum crepa_power crepa_scheduler crepa_self_flow crepa_self_flow_mask_ratio "
    "crepa_similarity_ema_decay crepa_similarity_threshold crepa_spatial_align crepa_teacher_block_index "
    "crepa_threshold_mode crepa_use_backbone_features crepa_use_tae crepa_warmup_steps data_aesthetic_score "
    "delete_invalid_checkpoints delete_model_after_load delete_nsfw_images delete_problematic_images "
    "delete_unwanted_images diff2flow_loss disable_assistant_lora disable_multiline_split "
    "disable_segmented_timestep_sampling distillation_config flow_timesteps_mode freeze_encoder_after "
    "freeze_encoder_before freeze_encoder_strategy gradient_precision ignore_final_epochs init_lokr_norm "
    "init_lora_ema init_lora_step internal_guidance_block_index internal_guidance_loss_weight "
    "irepa_projector_kernel_size irepa_spatial_norm_alpha layersync_lambda layersync_student_block "
    "layersync_teacher_block mixflow_gamma nextlat_block_index nextlat_kl_weight nextlat_state_loss "
    "nextlat_weight prodigy_steps scheduled_sampling_order scheduled_sampling_prob_end "
    "scheduled_sampling_prob_start scheduled_sampling_probability scheduled_sampling_ramp_shape "
    "scheduled_sampling_ramp_steps scheduled_sampling_reflexflow scheduled_sampling_reflexflow_alpha "
    "scheduled_sampling_reflexflow_beta1 scheduled_sampling_reflexflow_beta2 scheduled_sampling_sampler "
    "scheduled_sampling_start_step scheduled_sampling_strategy singlora_ramp_up_steps snr_weight "
    "soft_min_snr_sigma_data strict_epoch_limit t5_padding text_encoder_limit timestep_bias_begin "
    "twinflow_delta_t twinflow_enhanced_ratio twinflow_estimate_order twinflow_target_clamp "
    "timestep_bias_end timestep_bias_multiplier timestep_bias_portion tokenizer_max_length "
    "training_scheduler_timestep_spacing twinflow_target_step_count unet_attention_slice urepa_cutoff_step "
    "urepa_decay_steps urepa_encoder_image_size urepa_lambda urepa_lambda_end urepa_manifold_weight "
    "urepa_model urepa_power urepa_scheduler urepa_similarity_ema_decay urepa_similarity_threshold "
    "urepa_threshold_mode urepa_use_tae urepa_warmup_steps xm_block_size xm_candidate_count "
    "xm_selection_scope xm_training_target"
)
_OTHER = (
    "acestep_lora_target audio_channels audio_duration_interval audio_flow_schedule_shift "
    "audio_max_duration_seconds audio_min_duration_seconds audio_truncation_mode controlnet_custom_config "
    "controlnet_model_name_or_path cosmos3_generator_component cosmos3_reasoner_component "
    "custom_text_encoder_intermediary_layers deepfloyd_validation_pipeline_mode "
    "deepfloyd_validation_stage1_model deepfloyd_validation_stage2_model deepfloyd_validation_stage3_mode "
    "deepfloyd_validation_stage3_model deepfloyd_validation_stage3_noise_level "
    "hidream_load_balancing_loss_weight hidream_use_load_balancing_loss ideogram_auto_json "
    "ideogram_fp8_base_upcast ideogram_load_unconditional_transformer ideogram_prompt_enhancer_head_id "
    "ideogram_prompt_upsample ideogram_schedule_mu ideogram_schedule_std ideogram_uncond_ramtorch "
    "ideogram_validation krea2_reference_latents ltx2_intrinsic_conditioning ltx2_validation_audio_guidance "
    "ltx2_validation_pipeline_mode ltx2_validation_spatial_upsampler_filename "
    "ltx2_validation_spatial_upsampler_model ltx_i2v_prob ltx_partial_noise_fraction ltx_protect_first_frame "
    "ltx_train_mode lyrics_embedder_lr lyrics_embedder_lr_scheduler lyrics_embedder_optimizer "
    "lyrics_embedder_train max_grounding_entities minimax_h3_reference_mode minimax_h3_sparse_attention "
    "minimax_h3_sparse_block_shape minimax_h3_sparse_share_heads minimax_h3_sparse_start_layer "
    "minimax_h3_sparse_video_kv_fraction minimax_h3_target_mode minimax_music_lm_adapter "
    "minimax_music_lm_adapter_strength minimax_music_lm_max_frames minimax_music_lm_precache_mode "
    "minimax_music_train_component pixart_validation_pipeline_mode pixart_validation_stage1_model "
    "pixart_validation_stage2_model pretrained_gemma_model_name_or_path "
    "pretrained_grounding_model_name_or_path pretrained_t5_model_name_or_path "
    "qwen_text_encoder_model_name_or_path refiner_training_invert_schedule refiner_training_strength "
    "sana_complex_human_instruction sd3_clip_uncond_behaviour sd3_t5_uncond_behaviour "
    "sdxl_refiner_uses_full_range sdxl_validation_pipeline_mode sdxl_validation_stage1_model "
    "sdxl_validation_stage2_model wan_force_2_1_time_embedding wan_validation_load_other_stage"
)
_CACHE = (
    "accelerator_cache_clear_interval aspect_bucket_alignment aspect_bucket_disable_rebuild "
    "aspect_bucket_rounding aspect_bucket_worker_count cache_dir cache_dir_text cache_dir_vae "
    "compress_disk_cache data_backend_sampling debug_aspect_buckets enable_nsfw_check "
    "image_processing_batch_size keep_vae_loaded metadata_update_interval nsfw_check_backend_types "
    "nsfw_check_min_votes nsfw_check_models nsfw_check_sample_types nsfw_check_video_frame_count "
    "nsfw_check_video_frame_selection nsfw_check_video_min_flagged_frames parquet_caption_column "
    "parquet_filename_column preserve_data_backend_cache read_batch_size skip_file_discovery "
    "text_cache_disable text_cache_ondemand text_embed_full_cache text_encoder_batch_size vae_batch_size "
    "vae_cache_disable vae_cache_ondemand vae_cache_scan_behaviour vae_dtype vae_enable_patch_conv "
    "vae_enable_slicing vae_enable_temporal_roll vae_enable_tiling write_batch_size"
)
_READ = (
    "adam_beta1 adam_beta2 adam_epsilon adam_weight_decay assistant_lora_path base_model_precision "
    "caption_dropout_probability caption_strategy checkpoint_epoch_interval checkpoint_step_interval "
    "checkpointing_steps checkpoints_total_limit control controlnet data_backend_config ema_decay "
    "flow_beta_schedule_alpha flow_beta_schedule_beta flow_schedule_auto_shift flow_schedule_shift "
    "flow_sigmoid_scale flow_use_beta_schedule flow_use_uniform_schedule flux_guidance_max flux_guidance_min "
    "flux_guidance_mode flux_guidance_value grad_clip_method gradient_accumulation_steps hub_model_id huber_c "
    "huber_schedule init_lora input_perturbation input_perturbation_steps instance_prompt learning_rate "
    "lora_alpha lora_dropout lora_init_type lora_initialisation_style lora_rank lora_type loss_type lr_end "
    "lr_num_cycles lr_power lr_scale lr_scale_sqrt lr_scheduler lr_warmup_steps lycoris_config "
    "masked_loss_probability max_grad_norm max_train_steps mixed_precision model_family model_flavour "
    "model_type noise_offset noise_offset_probability num_train_epochs offset_noise only_instance_prompt "
    "optimizer optimizer_beta1 optimizer_beta2 optimizer_config output_dir prediction_type "
    "prepend_instance_prompt pretrained_model_name_or_path pretrained_vae_model_name_or_path push_to_hub "
    "report_to rescale_betas_zero_snr resolution resolution_type seed snr_gamma text_encoder_lr "
    "timestep_bias_strategy train_batch_size train_text_encoder use_dora use_ema use_soft_min_snr "
    "user_prompt_library validation_disable validation_guidance validation_negative_prompt "
    "validation_num_inference_steps validation_prompt validation_prompt_library validation_seed "
    "validation_step_interval validation_steps"
)
_BACKEND_IDLE = (
    "id type default cache_dir cache_dir_vae cache_dir_conditioning_image_embeds "
    "conditioning_image_embed_batch_size text_embeds image_embeds conditioning_image_embeds write_batch_size "
    "text_encoder_batch_size text_cache_ondemand text_cache_disable metadata_backend metadata_update_interval "
    "vae_cache_clear_each_epoch vae_cache_ondemand vae_cache_disable skip_file_discovery "
    "preserve_data_backend_cache hash_filenames resolution_type aspect_bucket_alignment compress_cache "
    "delete_unwanted_images delete_problematic_images delete_nsfw_images csv_file csv_cache_dir csv_url_column "
    "csv_caption_column parquet huggingface dataset_name split streaming aws_bucket_name aws_region_name "
    "aws_endpoint_url aws_access_key_id aws_secret_access_key aws_data_prefix aws_max_pool_connections video "
    "audio config start_epoch start_step end_epoch end_step probability train_batch_size"
)
BACKEND: Mapping[str, Rule] = {
    **each("instance_data_dir dataset_type disabled caption_strategy repeats resolution crop crop_aspect "
           "is_regularisation_data instance_prompt prepend_instance_prompt only_instance_prompt "
           "caption_dropout_probability", TOGETHER),
    **each(_BACKEND_IDLE, Idle("datasets are folders; caches lie in data.cache_dir")),
    **each("conditioning conditioning_type conditioning_data source_dataset_id", Refused(
        "control images are not trained here")),
    "crop_style": Lacks("images are cropped at their middle", off=("center", "centre", "random")),
    **each("minimum_image_size maximum_image_size target_downsample_size max_upscale_threshold "
           "minimum_aspect_ratio maximum_aspect_ratio max_num_samples", Lacks("all images are trained")),
    "caption_shuffle": Lacks("give data.shuffle_tags"),
    "caption_filter_list": Lacks("captions are read as they are written"),
    "timestep_sampling_offset": Lacks("all images are trained at the same timesteps"),
    "slider_strength": Refused("sliders are not trained here"),
    "disable_multiline_split": Idle("data.caption_lines says what several lines are"),
}  # fmt: skip
"""Keys of one data backend."""
KEYS: Mapping[str, Rule] = {
    **each(_READ, TOGETHER),
    **each(_PROGRAM, Idle("is about that program, not about the result")),
    **each(_MEMORY, Idle("the plan fits the training into memory; that never changes the result")),
    **each(_CACHE, Idle("images and texts are cached once, as the plan says")),
    **each(_SAMPLES, Idle("samples are drawn with the base's own sampler, see sampling")),
    **each(_OTHER, Idle("is of a model that is not trained here")),
    **each(_FEATURES, Idle("is of something that is off, or that is not done here")),
    **each(_SWITCHES, Lacks("has no equivalent", off=("disabled",))),
    "flux_lora_target": Lacks("choose adapter.targets", off=("all", "all+ffs", "mmdit")),
    "peft_lora_mode": Lacks("the adapter is a plain LoRA", off=("standard",)),
    "revision": To("base.revision"),
    **under("data_backends[].", BACKEND),
    "data_backends": TOGETHER,
}
"""Every option, without the dashes that older files put before it."""
MODELS: Mapping[str, tuple[bool, str, Mapping[str, str]]] = {
    "sd1x": (False, "dreamshaper", {
        "1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5", "1.4": "CompVis/stable-diffusion-v1-4",
        "dreamshaper": "Lykon/dreamshaper-8"}),
    "sd2x": (False, "pseudoflex-v2", {
        "pseudoflex-v2": "bghira/pseudo-flex-v2", "digitaldiffusion": "Junglerally/Digital-Diffusion",
        "2.1": "stabilityai/stable-diffusion-2-1", "2.0": "stabilityai/stable-diffusion-2-0"}),
    "sdxl": (False, "base-1.0", {"base-1.0": "stabilityai/stable-diffusion-xl-base-1.0"}),
    "sd3": (True, "medium", {
        "medium": "stabilityai/stable-diffusion-3.5-medium", "large": "stabilityai/stable-diffusion-3.5-large"}),
    "flux": (True, "krea", {
        "dev": "black-forest-labs/FLUX.1-dev", "krea": "black-forest-labs/FLUX.1-Krea-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell"}),
    "flux2": (True, "klein-9b", {
        "klein-4b": "black-forest-labs/FLUX.2-klein-base-4B", "klein-9b": "black-forest-labs/FLUX.2-klein-base-9B"}),
    "chroma": (True, "base", {
        "base": "lodestones/Chroma1-Base", "hd": "lodestones/Chroma1-HD", "flash": "lodestones/Chroma1-Flash"}),
    "qwen_image": (True, "v2.0", {"v1.0": "Qwen/Qwen-Image", "v2.0": "Qwen/Qwen-Image-2512"}),
    "z_image": (True, "turbo-ostris-v2", {
        "base": "Tongyi-MAI/Z-Image", "turbo": "Tongyi-MAI/Z-Image-Turbo",
        "turbo-ostris-v2": "Tongyi-MAI/Z-Image-Turbo"}),
}  # fmt: skip
"""Families that are trained here: by flow matching or not, the default flavour, the flavours' Hub ids."""
QUANTIZED: Mapping[str, str] = {
    "int8-quanto": "int8", "int8-torchao": "int8", "int4-quanto": "nf4", "int4-torchao": "nf4",
    "int2-quanto": "nf4", "fp8-quanto": "fp8", "fp8uz-quanto": "fp8", "fp8-torchao": "fp8", "nf4-bnb": "nf4",
    "nf8-bnb": "int8", "int8-sdnq": "int8", "uint8-sdnq": "int8", "int4-sdnq": "nf4", "uint4-sdnq": "nf4",
    "fp8-sdnq": "fp8",
}  # fmt: skip
"""How a quantized base is kept."""
