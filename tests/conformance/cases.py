"""Which of PyTorch's tests run, how, and with which expected results; for torch 2.15."""

VARIANTS = ("gloo", "paceline", "paceline as gloo", "paceline on two nodes")
AS_GLOO = VARIANTS[2:]  # registered under that name


def _tests(names: str) -> frozenset[str]:
    return frozenset("test_" + name for name in names.split())


# Tests that the suite skips although they need no GPU, fewer than 8 ranks, and work on any backend. Without them nothing would
# test all_to_all, or a group without all ranks.
LIFTED = _tests("""
    all_gather_coalesced_group all_gather_group all_reduce_coalesced_group_max all_reduce_coalesced_group_min
    all_reduce_coalesced_group_product all_reduce_coalesced_group_sum all_reduce_group_max all_reduce_group_min
    all_reduce_group_product all_reduce_group_sum all_to_all all_to_all_complex all_to_all_full_group
    all_to_all_group all_to_all_single_equal_split all_to_all_single_equal_split_complex
    all_to_all_single_equal_split_full_group all_to_all_single_equal_split_group all_to_all_single_unequal_split
    all_to_all_single_unequal_split_complex all_to_all_single_unequal_split_full_group
    all_to_all_single_unequal_split_group barrier_group barrier_timeout_group batch_isend_irecv_op_list_err
    broadcast_group broadcast_object_list gather_group monitored_barrier_failure_order
    monitored_barrier_wait_all_ranks new_subgroups new_subgroups_by_enumeration_input_rank_exceeds_world_size
    new_subgroups_by_enumeration_negative_input_rank new_subgroups_group_size_exceeds_world_size
    new_subgroups_overlap_not_allowed new_subgroups_world_size_not_divisible_by_group_size reduce_group_max
    reduce_group_min reduce_group_product reduce_group_sum scatter_group
""")

# Tests that keep tensors or models on GPUs but do not test GPUs, and that Gloo passes on a CPU: see on_cpu.py. Duplicates of tests
# that run on the CPU anyway are not in the list, nor are tests that need a GPU's streams or SyncBatchNorm.
ON_CPU = _tests("""
    1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager 3_level_hierarchical_model_averager
    DistributedDataParallel_with_amp_and_grad_is_view DistributedSampler_padding all_gather_into_cat_tensor_cuda
    batch_isend_irecv_no_rank_zero_nccl batch_isend_irecv_op_err batch_isend_irecv_ring_exchange_nccl
    coalescing_manager coalescing_manager_async compute_bucket_assignment_by_size_sparse_error_with_logger
    compute_bucket_assignment_by_size_sparse_error_without_logger ddp_broadcast_buffer ddp_broadcast_buffer_via_hook
    ddp_broadcast_buffers_deprecation_warning ddp_bucket_cap_mb_list ddp_buffer_hook_allreduce
    ddp_buffer_hook_allreduce_return_future ddp_build_debug_param_to_name_mapping
    ddp_build_debug_param_to_name_mapping_requires_grad ddp_comm_hook_logging
    ddp_control_flow_different_across_ranks ddp_control_flow_same_across_ranks ddp_device_mesh_initialization
    ddp_forward_backward_hook ddp_grad_div_uneven_inputs ddp_hook_parity_allreduce
    ddp_hook_parity_allreduce_process_group ddp_hook_parity_post_localSGD ddp_hook_parity_powerSGD
    ddp_hook_pickling_powerSGD ddp_ignore_params_arg ddp_init_sync_buffers_with_forward_sync_buffers_false
    ddp_join_model_equivalence ddp_join_respects_forward_sync_buffers_false ddp_model_diff_num_params_across_ranks
    ddp_model_diff_shape_across_ranks ddp_multiple_nested_unused_params_err_ignore_params
    ddp_multiple_nested_unused_params_error ddp_namedtuple ddp_new_tensor_in_fwd ddp_new_tensor_in_fwd_static_graph
    ddp_profiling_torch_profiler ddp_python_error_logged ddp_remove_autograd_hooks ddp_returns_tensor_with_no_grad
    ddp_shared_grad_acc_unused_params ddp_sink_noclone ddp_static_graph_nested_types ddp_sync_module_states
    ddp_uneven_input_exception ddp_uneven_input_join_disable ddp_uneven_inputs
    ddp_unused_params_rebuild_buckets_exception
    ddp_zero_output_features detect_ddp_is_actually_static different_graph_across_ranks get_data_parallel_params
    invalid_static_graph new_subgroups_by_enumeration output_unused_in_loss_dict_module
    output_unused_in_loss_tuple_module periodic_model_averager periodic_model_averager_param_group
    post_localSGD_optimizer_parity post_localSGD_optimizer_parity_grad_is_view
    post_localSGD_optimizer_parity_with_hierarchical_sgd
    post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view post_localSGD_optimizer_step_reload
    reduce_scatter_v_cuda send_recv_nccl send_recv_nccl_autograd_profiler send_recv_nccl_torch_profiler
    skip_all_reduce_unused_parameters stateless_api_with_ddp static_graph_multi_forward
    undefined_grad_parity_unused_parameters verify_model_across_rank_with_logger
    verify_model_across_rank_without_logger
""")

# The reason of a skip for backends that are not called gloo: these tests run as `paceline as gloo` instead.
FOR_GLOO_ONLY = r"(?i)\bgloo\b"

# Tests that Gloo passes but paceline cannot, each with the reason.
_NAMED_SENDER = "a message from another node is received only from a sender that is named"
_BACKEND_NAME = "DDP logs the name of the backend's type in C++, which is `custom` for every backend outside torch"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "paceline": {"test_ddp_logging_data_cpu": _BACKEND_NAME},
    "paceline as gloo": {"test_ddp_logging_data_cpu": _BACKEND_NAME},
    "paceline on two nodes": {"test_ddp_logging_data_cpu": _BACKEND_NAME, "test_send_recv_any_source": _NAMED_SENDER,
                              "test_send_recv_any_source_autograd_profiler": _NAMED_SENDER,
                              "test_send_recv_any_source_torch_profiler": _NAMED_SENDER},
}

# The tests of --quick, each of which needs 2 or 3 ranks at most. As gloo, only the tests that need that name.
QUICK = {
    "paceline": _tests("""
        DistributedDataParallelCPU DistributedDataParallelCPU_grad_is_view all_gather all_gather_coalesced_simple
        all_gather_coalesced_with_empty all_gather_complex all_gather_full_group all_gather_into_cat_tensor_cuda
        all_gather_object_default_pg all_gather_object_subgroup all_reduce_complex_unsupported_ops
        all_reduce_full_group_max all_reduce_group_sum all_reduce_max all_reduce_min all_reduce_product
        all_reduce_sum all_reduce_sum_async all_reduce_sum_complex all_to_all all_to_all_complex
        all_to_all_full_group all_to_all_group all_to_all_single_equal_split all_to_all_single_equal_split_complex
        all_to_all_single_equal_split_full_group all_to_all_single_equal_split_group all_to_all_single_unequal_split
        all_to_all_single_unequal_split_complex all_to_all_single_unequal_split_full_group
        all_to_all_single_unequal_split_group barrier barrier_full_group barrier_group
        batch_isend_irecv_ring_exchange_nccl broadcast broadcast_full_group broadcast_group broadcast_object_list
        coalescing_manager coalescing_manager_async ddp_broadcast_buffer ddp_comm_hook_logging
        ddp_control_flow_different_across_ranks ddp_control_flow_same_across_ranks ddp_hook_parity_allreduce
        ddp_hook_parity_powerSGD
        ddp_join_model_equivalence ddp_profiling_torch_profiler ddp_sync_module_states ddp_uneven_input_exception
        ddp_uneven_input_join_disable ddp_zero_output_features destroy_full_group gather gather_checks
        gather_full_group get_backend irecv isend new_subgroups_by_enumeration_negative_input_rank
        new_subgroups_group_size_exceeds_world_size periodic_model_averager post_localSGD_optimizer_parity
        reduce_full_group_max reduce_group_sum reduce_max reduce_min reduce_product reduce_scatter_v_cuda reduce_sum
        reduce_sum_twice scatter scatter_checks scatter_complex scatter_full_group send_recv send_recv_any_source
        send_recv_any_source_autograd_profiler send_recv_autograd_profiler send_recv_with_tag
        send_recv_with_tag_autograd_profiler
    """),
    "paceline as gloo": _tests("""
        all_reduce_coalesced_full_group_sum all_reduce_coalesced_max all_reduce_coalesced_min
        all_reduce_coalesced_product all_reduce_coalesced_sum barrier_timeout_full_group barrier_timeout_global
        batch_isend_irecv_gloo batch_isend_irecv_gloo_tags grads_same_across_ranks_with_no_sync
        monitored_barrier_gloo monitored_barrier_gloo_rank_0_timeout monitored_barrier_gloo_subgroup
        scatter_object_list sparse_all_reduce_sum
    """),
    "paceline on two nodes": _tests("""
        all_gather_coalesced_with_empty all_reduce_coalesced_sum all_to_all_single_unequal_split_full_group
        batch_isend_irecv_gloo ddp_uneven_input_exception monitored_barrier_gloo reduce_scatter_v_cuda sparse_all_reduce_sum
    """),
}
