#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <string>

#include <paceline/device.h>

#include "support/torch_ranks.h"

namespace paceline::test {

// Why tests on a CUDA device cannot run here; empty if they can. Asks in a process of its own,
// since ranks are forked from this one, which must not initialise CUDA.
inline const std::string& why_no_cuda() {
  static const std::string reason =
      run_process_ranks(1,
                        [](int, shm::BootstrapSockets) {
                          return local_device().is_cuda() ? std::string() : describe_local_device();
                        })[0]
          .report;
  return reason;
}

// The device of a rank that may share it, also over NCCL. Call it before LibTorch is asked for
// CUDA.
inline at::Device shared_device() {
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  return local_device();
}

// Runs `body` in ranks that share this machine's devices.
inline void expect_cuda_ranks(int size, const std::string& backend,
                              const std::function<void(int, int, at::Device)>& body) {
  const auto ends = run_torch_ranks(size, backend, [&](const RankContext& context) {
    const at::Device device = shared_device();
    at::globalContext().setDeterministicCuDNN(true);
    at::globalContext().setAllowTF32CuBLAS(false);
    at::globalContext().setAllowTF32CuDNN(false);
    const World world = init_process_group(context.init);
    body(context.rank, context.size, device);
    return std::string();
  });
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_TRUE(ends[rank].exited_cleanly())
        << "rank " << rank << " of " << size << " on " << backend << ": " << ends[rank].report;
  }
}

// Skips where there is no CUDA device.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_cuda().empty()) GTEST_SKIP() << why_no_cuda();
  }
};

}  // namespace paceline::test
