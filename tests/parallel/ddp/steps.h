#pragma once

#include <torch/torch.h>

#include <functional>
#include <string>

#include <paceline/ddp.h>
#include <paceline/error.h>

#include "support/small_net.h"

namespace paceline::test {

inline constexpr int kSteps = 6;  // counted from 0

using Model = DistributedDataParallel<NetImpl>;

// What a rank does before a step; returns whether the step is to be synchronised.
using Before = std::function<bool(Model& model, int rank, int step)>;

inline void train(Model& model, int rank, const Before& before) {
  torch::optim::SGD sgd(model.parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const bool sync = before(model, rank, step);
    const auto guard = model.no_sync(!sync);
    const auto x = batch_of(rank, step, at::kDouble);
    sgd.zero_grad();
    loss_of(model(x), x).backward();
    if (sync) sgd.step();
  }
}

inline std::string text_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace paceline::test
