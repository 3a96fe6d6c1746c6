#pragma once

/// @file
/// Everything that Paceline offers but <paceline/mpi.h>. Include <torch/torch.h> before it.

/// @namespace paceline
/// Distributed data-parallel training.
/// @namespace paceline::data
/// Data sets, samplers and the data loader.
/// @namespace paceline::comm_hooks
/// Ready-made communication hooks.
/// @namespace paceline::optim
/// Optimizers, schedules of learning rates and averages of models.

#include <paceline/all_reduce_algorithms.h>
#include <paceline/apply_to_tensors.h>
#include <paceline/autocast.h>
#include <paceline/checkpoint.h>
#include <paceline/checkpoint_directory.h>
#include <paceline/collectives.h>
#include <paceline/comm_hooks.h>
#include <paceline/communicator.h>
#include <paceline/config.h>
#include <paceline/data_loader.h>
#include <paceline/data_parallel.h>
#include <paceline/dataset_concepts.h>
#include <paceline/datasets.h>
#include <paceline/ddp.h>
#include <paceline/debug.h>
#include <paceline/device.h>
#include <paceline/device_mesh.h>
#include <paceline/distributed.h>
#include <paceline/error.h>
#include <paceline/exponential_moving_average.h>
#include <paceline/for_each_tensor.h>
#include <paceline/grad_scaler.h>
#include <paceline/hogwild.h>
#include <paceline/images.h>
#include <paceline/join.h>
#include <paceline/local_sgd.h>
#include <paceline/log.h>
#include <paceline/logger.h>
#include <paceline/logical_data_loader.h>
#include <paceline/logical_ranks.h>
#include <paceline/lr_scheduler.h>
#include <paceline/map.h>
#include <paceline/metrics.h>
#include <paceline/module_or_holder.h>
#include <paceline/optimizers.h>
#include <paceline/parameter_server.h>
#include <paceline/parameter_server_stats.h>
#include <paceline/pipeline.h>
#include <paceline/power_sgd.h>
#include <paceline/preemption.h>
#include <paceline/print.h>
#include <paceline/progress.h>
#include <paceline/reconfigure.h>
#include <paceline/record.h>
#include <paceline/sampler.h>
#include <paceline/spawn.h>
#include <paceline/subset.h>
#include <paceline/summary_writer.h>
#include <paceline/sync_batch_norm.h>
#include <paceline/tensor_dataset.h>
#include <paceline/token_dataset.h>
#include <paceline/torch_data.h>
#include <paceline/transforms.h>
#include <paceline/tune_malloc.h>
#include <paceline/version.h>
