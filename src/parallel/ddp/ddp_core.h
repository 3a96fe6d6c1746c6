#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/ddp_options.h>
#include <paceline/ddp_stats.h>
#include <paceline/join.h>

#include "parallel/ddp/logical_ranks_core.h"
#include "parallel/ddp/reducer.h"
#include "parallel/ddp/wrapped_model.h"

namespace paceline::detail {

// What DistributedDataParallel does around forwards and backwards, whatever runs the forward.
class DdpCore final : public Joinable {
 public:
  // Collective.
  DdpCore(ddp::WrappedModel model, const DdpOptions& options);
  DdpCore(const DdpCore&) = delete;
  DdpCore& operator=(const DdpCore&) = delete;
  ~DdpCore() override;

  // Call before each forward, on the thread that will run its backward.
  void before_forward() { before_forward(model_.is_training(), *no_sync_guards_ == 0); }
  // The same for a caller that knows the model's mode, and whether the backward is synchronised, or
  // a later one of the same step, by synchronise_backward.
  void before_forward(bool training, bool synchronise, bool later = false);
  void after_forward() { reducer_->after_forward(); }
  // See Reducer.
  bool awaits_backward() const { return reducer_->awaits_backward(); }
  bool may_get_gradients() const { return reducer_->may_get_gradients(); }
  bool runs_backward() const { return reducer_->runs_backward(); }
  // Synchronises the next backward although its forward ran under no_sync.
  void synchronise_backward() { reducer_->synchronise_backward(); }

  // The tensors that forwards copy from rank 0, if a module has replaced some.
  void set_buffers(std::vector<at::Tensor> buffers) { buffers_ = std::move(buffers); }
  // Whether the ranks' buffers may differ, as after a synchronised training forward.
  bool buffers_may_differ() const { return buffers_may_differ_; }
  void set_buffers_may_differ(bool differ) { buffers_may_differ_ = differ; }

  // For a caller that coordinates join itself: the options while it is in one. It notifies the
  // ranks that have joined before it calls before_forward, and calls main_hook and post_hook.
  void set_join(const std::optional<JoinOptions>& options) { outer_join_ = options; }

  void set_samples(double count);
  at::Tensor average_loss(const at::Tensor& loss) const;
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  void on_backward_error(std::function<void()> call) {
    reducer_->on_backward_error(std::move(call));
  }

  std::optional<at::Device> input_device() const {
    if (options_.device_ids.empty()) return std::nullopt;
    return options_.device_ids.front();
  }
  bool watches_outputs() const { return options_.static_graph && at::GradMode::is_enabled(); }
  void watch_output(const at::Tensor& output) { reducer_->watch_output(output); }
  const std::shared_ptr<int>& no_sync_guards() const { return no_sync_guards_; }
  const std::shared_ptr<LogicalRanksCore>& logical_ranks() const { return logical_ranks_; }
  const DdpStats& stats() const { return reducer_->stats(); }
  const ddp::WrappedModel& model() const { return model_; }

  ProcessGroup join_process_group() const override { return options_.process_group; }
  void main_hook() override;
  void post_hook(int last) override;

 private:
  // A rank's part in a step of `join`.
  enum class Part : std::int64_t { joined, local, synchronised };

  const JoinOptions* join() const { return outer_join_ ? &*outer_join_ : join_options(); }
  bool broadcasts_buffers() const;
  bool weighs_active() const;
  void broadcast_all(int root);
  void copy_buffers();
  void meet(bool broadcasts, bool synchronise);
  std::pair<bool, bool> agree(Part part, bool broadcasts);
  void check_loop() const;
  void check_parameters();
  bool is_check_due();
  void check_models(bool with_buffers);

  ddp::WrappedModel model_;
  DdpOptions options_;
  std::shared_ptr<int> no_sync_guards_ = std::make_shared<int>(0);
  std::unique_ptr<ddp::Reducer> reducer_;
  std::shared_ptr<LogicalRanksCore> logical_ranks_;
  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> wrapped_;  // the module's parameters at construction
  std::uint64_t forwards_ = 0;
  std::uint64_t steps_ = 0;         // synchronised ones
  double samples_ = 0;              // that set_samples was given last
  bool buffers_may_differ_ = true;  // unless the last training forward was under no_sync
  bool has_hook_ = false;
  std::optional<JoinOptions> outer_join_;
  int buffer_source_ = 0;   // by group rank; in join, as in PyTorch, the last that has not joined
  bool all_active_ = true;  // no rank has joined
};

}  // namespace paceline::detail
