#pragma once

#include <utility>

#include "backends/paceline/backend.h"
#include "distributed/start.h"

namespace paceline::backends {

// How PacelineBackend runs a call: here, or on the progress thread if the options say asyncOp.
template <typename CallOptions, typename Body>
PacelineBackend::WorkPtr PacelineBackend::run(Call call, const CallOptions& options, Body body) {
  check_usable(call.kind.name);
  for (const at::Tensor& output : call.outputs) {
    distributed::check_no_overlap(output, call.kind.name);
  }
  const auto timeout = effective_timeout(options.timeout);
  auto work = c10::make_intrusive<PacelineWork>(call.kind.type, call.kind.title, call.inputs,
                                                std::move(call.outputs), ++sequence_, timeout);
  const auto perform = [this, timeout, group_calls = call.group_calls](auto& make_calls) {
    group_->set_timeout(timeout, group_calls);
    make_calls();
  };
  if (!options.asyncOp) {
    try {
      progress_->run_here([&] { perform(body); });
    } catch (...) {
      work->complete(std::current_exception(), *hooks_);
      throw;
    }
    work->complete(nullptr, *hooks_);
    return work;
  }
  region_->threads().note_other_thread();
  progress_->enqueue(
      [work, perform, body = std::move(body), hooks = hooks_]() mutable -> ProgressThreads::After {
        std::exception_ptr error;
        try {
          perform(body);
        } catch (...) {
          error = std::current_exception();
        }
        const auto future = work->complete(error, *hooks);
        if (!future) return {};
        return [work, future] { work->settle(*future); };
      });
  return coalesced(work);
}

}  // namespace paceline::backends
