#include "all_reduce.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>

#include "batch.h"
#include "guest.h"

namespace paceline::bench {
namespace {

using BackendPointer = c10::intrusive_ptr<c10d::Backend>;

BackendPointer backend_of(const ProcessGroup& group) {
  return group.c10d()->getBackend(c10::DeviceType::CPU);
}

at::Tensor allocate(const BackendPointer& backend, bool shared, std::int64_t elements) {
  const auto options = at::TensorOptions(at::kFloat);
  return shared ? backend->allocateTensor(elements, options) : at::empty({elements}, options);
}

Contender contender(std::string implementation, std::string variant, const BackendPointer& backend,
                    std::int64_t bytes) {
  using Call = std::vector<at::Tensor>;
  auto calls = std::make_shared<std::vector<Call>>();
  for (int i = 0; i < calls_of(bytes); ++i) {
    calls->push_back({allocate(backend, variant == "shared", bytes / 4)});
  }
  return {.implementation = std::move(implementation),
          .variant = std::move(variant),
          .prepare =
              [calls] {
                for (const Call& call : *calls) call.front().fill_(1);
              },
          .run =
              [calls, backend] {
                c10d::AllreduceOptions options;
                options.asyncOp = false;  // as a caller that waits at once says, in PyTorch too
                for (Call& call : *calls) backend->allreduce(call, options)->wait();
              },
          .calls = static_cast<int>(calls->size())};
}

Contender with_openmpi(const std::string& mpirun, std::int64_t bytes) {
  return guest_contender("openmpi", calls_of(bytes), [&] {
    return std::vector<std::string>{mpirun,
                                    "-np",
                                    std::to_string(get_world_size()),
                                    "--bind-to",
                                    "none",
                                    "--oversubscribe",
                                    beside_this_program(kOpenMpiProgram),
                                    std::to_string(bytes)};
  });
}

}  // namespace

Result measure_all_reduce(const std::optional<ProcessGroup>& gloo, const std::string& mpirun,
                          std::int64_t bytes, const RoundPlan& plan) {
  const BackendPointer ours = backend_of({});
  std::vector<Contender> contenders{contender("paceline", "shared", ours, bytes),
                                    contender("paceline", "ordinary", ours, bytes)};
  if (gloo) contenders.push_back(contender("gloo", "", backend_of(*gloo), bytes));
  if (!mpirun.empty()) contenders.push_back(with_openmpi(mpirun, bytes));
  return {"all_reduce", get_world_size(), bytes, measure(contenders, plan)};
}

}  // namespace paceline::bench
