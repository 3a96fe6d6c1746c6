#pragma once

/// @file
/// Which device a rank trains on.

#include <c10/core/Device.h>
#include <paceline/api.h>

#include <string>

namespace paceline {

/// The device of this rank: the CUDA device whose index is the local rank, modulo the number of
/// devices, or the CPU if there is none. CUDA_VISIBLE_DEVICES decides which devices a process has,
/// and their order. Works before init_process_group, where the launcher's variables say which local
/// rank this is.
///
/// Loads LibTorch's part for CUDA if this machine has a driver and a device: a program that is
/// linked to paceline::paceline alone runs with and without them. Call it before LibTorch is asked
/// for CUDA in another way, torch::manual_seed included. Makes the CUDA device the current one of
/// the calling thread, as torch.cuda.set_device does.
[[nodiscard]] PACELINE_API c10::Device local_device();

/// What local_device() chooses, and why, as a sentence for a log.
[[nodiscard]] PACELINE_API std::string describe_local_device();

}  // namespace paceline
