#include "parallel/ddp/ddp_core.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <random>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/environment.h"
#include "base/log.h"
#include "base/per_process.h"
#include "distributed/process_state.h"
#include "parallel/ddp/model.h"
#include "parallel/gather.h"
#include "parallel/with_error_context.h"
#include "shm/membership/failure.h"
#include "trace/live_view.h"
#include "trace/timeline.h"

namespace paceline::detail {
namespace {

// What the collective calls of a forward in `join` are for.
constexpr const char* kAgreeing =
    "agreeing with the ranks that have joined; in join, make no other collective calls, and run "
    "the backward of one model before the forward of the next";

void check_caps(const DdpOptions& options) {
  const auto check = [](double mib, const char* option) {
    if (!(mib > 0)) throw UsageError(fmt::format("{} of {}: it must be positive", option, mib));
  };
  if (options.bucket_cap_mb) check(*options.bucket_cap_mb, "bucket_cap_mb");
  for (const double mib : options.bucket_cap_mb_list) check(mib, "bucket_cap_mb_list");
  if (options.bucket_cap_mb && !options.bucket_cap_mb_list.empty()) {
    throw UsageError("set bucket_cap_mb or bucket_cap_mb_list, not both");
  }
}

void check_devices(const DdpOptions& options, const std::vector<ddp::NamedTensor>& parameters) {
  const at::Device device = parameters.front().tensor.device();
  for (const auto& one : parameters) {
    if (one.tensor.device() == device) continue;
    throw UsageError(
        fmt::format("parameter {} is on {} and {} on {}: all parameters must be on one device",
                    parameters.front().name, device.str(), one.name, one.tensor.device().str()));
  }
  auto asked = options.device_ids;
  if (options.output_device) asked.push_back(*options.output_device);
  if (device.is_cpu() && !asked.empty()) {
    throw UsageError(
        "device_ids and output_device are for models on an accelerator; this one is on the CPU");
  }
  if (options.device_ids.size() > 1) {
    throw UsageError(
        fmt::format("{} device_ids: a rank's model has one device", options.device_ids.size()));
  }
  for (const at::Device& one : asked) {
    if (one == device) continue;
    throw UsageError(fmt::format("device_ids or output_device say {}, but the model is on {}",
                                 one.str(), device.str()));
  }
}

void check_memory(const std::vector<ddp::NamedTensor>& parameters) {
  for (const auto& one : parameters) {
    const bool shares = one.tensor.layout() == at::kStrided &&
                        at::has_internal_overlap(one.tensor) == at::MemOverlap::Yes;
    if (!shares) continue;
    throw UsageError(fmt::format(
        "parameter {}: its elements share memory, as after expand(); use a clone()", one.name));
  }
}

// As which rank a process records.
struct RecordedPlace {
  int rank;
  int size;
  trace::Node node{};
  bool of_world = true;  // or of the model's group
};

// A world may be torch's, as in Python: there the launcher's variables say what it is, or else the
// model's group counts as the world. Only there can the variables be invalid by now; then it is
// empty.
std::optional<RecordedPlace> recorded_place(const ProcessGroup& group) {
  try {
    if (get_world_size() >= get_world_size(group)) {
      return RecordedPlace{get_rank(),
                           get_world_size(),
                           {.number = get_node_rank(), .ranks = get_local_world_size()}};
    }
  } catch (const UsageError& error) {
    base::log(LogLevel::warning, "`paceline top` and timelines lack this process: {}",
              error.what());
    return std::nullopt;
  }
  return RecordedPlace{.rank = get_rank(group), .size = get_world_size(group), .of_world = false};
}

std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

// Another one in a forked child.
std::uint64_t process_number() {
  struct Number {
    std::uint64_t value = random_number();
  };
  static base::PerProcess<Number> number;
  return number.get().value;
}

// For `paceline top`, and the timeline of a world whose ranks have changed, or that is torch's.
void start_recording(const RecordedPlace& place, const ddp::Recording& model) {
  const bool of_all = std::ssize(model.ranks) == place.size;
  trace::LiveView::start(place.rank, place.size, place.node, of_all ? model.first_rank : 0);
  // Other models of this process may have other groups.
  if (place.of_world || trace::Timeline::current() == nullptr) {
    trace::Timeline::start(place.rank, place.size, place.node);
  }
  if (model.ranks.empty()) return;
  if (auto* const live = trace::LiveView::current()) {
    live->describe_group(model.number, model.ranks);
  }
  if (auto* const timeline = trace::Timeline::current()) {
    timeline->describe_group(model.number, model.ranks);
  }
}

constexpr int kMaxLogicalRanks = static_cast<int>(shm::kMaxSources);

// `wanted` is the program's.
void check_logical_ranks(const DdpOptions& wanted, const ddp::WrappedModel& model, int ranks) {
  const int logical = wanted.logical_ranks;
  if (logical == 0) return;
  if (logical < ranks || logical > kMaxLogicalRanks) {
    throw UsageError(fmt::format(
        "logical_ranks of {}: it must be at least {}, the number of ranks, and at most {}", logical,
        ranks, kMaxLogicalRanks));
  }
  if (!wanted.broadcast_buffers) {
    throw UsageError(
        "logical_ranks needs broadcast_buffers: each logical rank starts from logical rank 0's "
        "buffers");
  }
  if (wanted.skip_all_reduce_unused_params) {
    throw UsageError("logical_ranks and skip_all_reduce_unused_params cannot be combined");
  }
  if (logical > ranks && model.has_sync_batch_norm()) {
    throw UsageError(fmt::format(
        "SyncBatchNorm cannot be used where a rank runs several logical ranks: it needs the "
        "batches of all of them at once. Run {} ranks, or use BatchNorm",
        logical));
  }
}

// `option` names `name`.
void check_parameter(const std::string& name, const char* option,
                     const std::vector<ddp::NamedTensor>& parameters) {
  if (std::ranges::count(parameters, name, &ddp::NamedTensor::name) > 0) return;
  throw UsageError(
      fmt::format("{} names {}, which is not a parameter that requires a gradient", option, name));
}

void check_triggers(const DdpOptions& options, const std::vector<ddp::NamedTensor>& parameters) {
  const auto& triggers = options.all_reduce_trigger_params;
  if (triggers.empty()) return;
  if (options.bucket_cap_mb || !options.bucket_cap_mb_list.empty()) {
    throw UsageError(
        "all_reduce_trigger_params and the sizes of buckets cannot be combined: buckets end with "
        "the named parameters");
  }
  for (const auto& name : triggers) check_parameter(name, "all_reduce_trigger_params", parameters);
}

void check_delayed(const DdpOptions& options, const std::vector<ddp::NamedTensor>& parameters) {
  const auto& delayed = options.delay_all_reduce_named_params;
  const std::string& trigger = options.param_to_hook_all_reduce;
  if (delayed.empty() != trigger.empty()) {
    throw UsageError("delay_all_reduce_named_params and param_to_hook_all_reduce need each other");
  }
  if (trigger.empty()) return;
  check_parameter(trigger, "param_to_hook_all_reduce", parameters);
  for (const auto& name : delayed) {
    check_parameter(name, "delay_all_reduce_named_params", parameters);
  }
  if (std::ranges::count(delayed, trigger) > 0) {
    throw UsageError(
        fmt::format("{} cannot wait for its own gradient: it is named by both "
                    "delay_all_reduce_named_params and param_to_hook_all_reduce",
                    trigger));
  }
}

}  // namespace

DdpCore::DdpCore(ddp::WrappedModel model, const DdpOptions& options)
    : model_(std::move(model)), options_(options) {
  check_caps(options);
  if (options.check_sync_every < 0) {
    throw UsageError(fmt::format("check_sync_every of {}: it is a number of steps, or 0 for never",
                                 options.check_sync_every));
  }
  if (options.skip_all_reduce_unused_params &&
      (!options.find_unused_parameters || options.static_graph)) {
    throw UsageError(
        "skip_all_reduce_unused_params requires find_unused_parameters without static_graph");
  }
  if (options.average < Average::ranks || options.average > Average::sum) {
    throw UsageError(fmt::format("average is {}, which is no Average: use ranks, samples or sum",
                                 static_cast<int>(options.average)));
  }
  if (options.average == Average::samples && model_.has_sync_batch_norm()) {
    throw UsageError(
        "Average::samples would weigh gradients that SyncBatchNorm has already mixed: let each "
        "rank's loss be a sum over samples, divided by the same number on all ranks, and use "
        "Average::ranks");
  }
  const auto parameters = model_.trainable_parameters();
  if (parameters.empty()) {
    throw UsageError(
        "DistributedDataParallel needs a parameter that requires a gradient, and there is none");
  }
  check_devices(options, parameters);
  check_memory(parameters);
  check_delayed(options, parameters);
  check_triggers(options, parameters);
  // The world of now, also when there is another one later.
  options_.process_group = ProcessGroup(options.process_group.c10d());
  const int ranks = get_world_size(options_.process_group);
  check_logical_ranks(options, model_, ranks);
  for (const auto& buffer : model_.buffers()) buffers_.push_back(buffer.tensor);
  const bool has_timeline =
      base::environment().timeline.has_value() || trace::Timeline::current() != nullptr;
  const auto place = recorded_place(options_.process_group);
  ddp::Recording recording{.number = ddp::next_model_number(), .process = process_number()};
  if (place) recording.rank = place->rank;
  if (ranks == 1) recording.ranks = {recording.rank};
  // One rank alone trains like several, so that it fails where they would.
  if (ranks > 1 && options.init_sync) {
    recording.measures = has_timeline && parameters.front().tensor.is_cpu();
    recording = ddp::check_same_model(model_, options_, recording);
    broadcast_all(0);
  }
  for (const auto& parameter : model_.parameters()) wrapped_.push_back(parameter.tensor);
  if (place) start_recording(*place, recording);
  reducer_ = std::make_unique<ddp::Reducer>(parameters, model_.frozen_parameters(), options_,
                                            recording.number);
  if (recording.measures) reducer_->measure_reductions();
  logical_ranks_ =
      std::make_shared<LogicalRanksCore>(*reducer_, options_.logical_ranks, options_.process_group,
                                         buffers_, parameters.front().tensor.device());
  logical_ranks_->before_loop([this] {
    if (is_check_due()) check_models(true);
  });
}

DdpCore::~DdpCore() {
  if (logical_ranks_) logical_ranks_->forget_model();
}

void DdpCore::before_forward(bool training, bool synchronise, bool later) {
  if (!at::GradMode::is_enabled()) return reducer_->note_evaluation();
  if (training) check_parameters();
  if (training && logical_ranks_->enabled()) check_loop();
  const bool broadcasts = training && broadcasts_buffers();
  if (join() == nullptr) {
    buffer_source_ = 0;
    all_active_ = true;
  } else if (training) {
    parallel::with_error_context(kAgreeing, [&] { notify_join(); });
    static_cast<void>(agree(synchronise ? Part::synchronised : Part::local, broadcasts));
    if (synchronise && weighs_active()) reducer_->set_weight(1);
  }
  reducer_->before_forward(synchronise, training, later);
  if (!training) return;
  meet(broadcasts, synchronise || later);
  buffers_may_differ_ = synchronise || later;
}

bool DdpCore::broadcasts_buffers() const {
  return options_.broadcast_buffers && buffers_may_differ_ && !buffers_.empty() &&
         !logical_ranks_->enabled() && get_world_size(options_.process_group) > 1;
}

void DdpCore::set_samples(double count) {
  if (options_.average != Average::samples) {
    throw UsageError("set_samples needs average = Average::samples");
  }
  if (!(count >= 0) || !std::isfinite(count)) {
    throw UsageError(fmt::format("set_samples({}): it must be finite and non-negative", count));
  }
  reducer_->set_weight(count);
  samples_ = count;
}

at::Tensor DdpCore::average_loss(const at::Tensor& loss) const {
  if (!loss.defined() || loss.numel() != 1) {
    throw UsageError("average_loss: a loss must be a tensor with one element");
  }
  if (logical_ranks_->enabled()) {
    throw UsageError(
        "average_loss and logical_ranks cannot be combined: a rank's loss is that of several "
        "logical ranks");
  }
  const double weight = options_.average == Average::samples ? samples_ : 1;
  const auto options = at::device(loss.device()).dtype(at::kDouble);
  const at::Tensor sums = at::full({2}, weight, options);
  // The mean of no samples is NaN.
  if (weight != 0) sums[0] *= loss.detach().to(at::kDouble).reshape({});
  parallel::with_error_context(
      "averaging the losses of a closure, which the ranks must call equally often",
      [&] { all_reduce(sums, {.group = options_.process_group}); });
  if (sums[1].item<double>() == 0) {
    throw UsageError(
        "average_loss with Average::samples: no rank has samples; call set_samples "
        "before");
  }
  const at::Tensor joint = options_.average == Average::sum ? sums[0] : sums[0] / sums[1];
  return joint.to(loss.scalar_type());
}

void DdpCore::register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (!hook) throw UsageError("register_comm_hook needs a hook");
  if (options_.average != Average::ranks) {
    throw UsageError(
        "register_comm_hook and Average::samples or Average::sum cannot be combined: a hook "
        "averages itself, and may weigh by samples or add up");
  }
  if (options_.logical_ranks > 0) {
    throw UsageError(
        "register_comm_hook and logical_ranks cannot be combined: a hook gets a rank's sum, and "
        "the same bits on any number of ranks need the gradients of each logical rank");
  }
  reducer_->set_hook(std::move(hook));
  has_hook_ = true;
}

void DdpCore::main_hook() {
  const auto [sync, broadcasts] = agree(Part::joined, false);
  reducer_->before_forward(sync, true);
  if (broadcasts) copy_buffers();
  if (sync) {
    ++steps_;
    if (options_.average == Average::samples || weighs_active()) reducer_->set_weight(0);
    reducer_->main_hook();
  }
  buffers_may_differ_ = sync;
}

void DdpCore::post_hook(int last) {
  broadcast_all(last);
  reducer_->end_join();
}

bool DdpCore::weighs_active() const {
  return options_.average == Average::ranks && !has_hook_ && !join()->divide_by_initial_world_size;
}

void DdpCore::broadcast_all(int root) {
  std::vector<at::Tensor> tensors = buffers_;
  for (const auto& parameter : model_.parameters()) tensors.push_back(parameter.tensor);
  ddp::broadcast_from(root, tensors, options_.process_group);
}

// Not a change for autograd: an earlier forward may have saved the buffers for a backward that is
// still to come, as BatchNorm does, and does not read them there.
void DdpCore::copy_buffers() {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  ddp::broadcast_from(buffer_source_, buffers_, options_.process_group);
}

// The collective calls of a training forward.
void DdpCore::meet(bool broadcasts, bool synchronise) {
  const bool checks = synchronise && !logical_ranks_->enabled() && is_check_due();
  if (broadcasts) {
    parallel::with_error_context(
        "copying rank 0's buffers before a forward: if a rank has run out of inputs, give all "
        "ranks as many batches (DistributedSampler), or train inside join",
        [&] { copy_buffers(); });
  }
  if (checks) check_models(broadcasts);
  if (broadcasts || checks) reducer_->end_pre_forward_sync();
}

// In `join`: ranks that have joined learn whether the step is synchronised, and whether it
// broadcasts buffers. Throws Mismatch, the same on every rank, if the other ranks do not agree.
std::pair<bool, bool> DdpCore::agree(Part part, bool broadcasts) {
  if (model_.has_sync_batch_norm()) {
    throw UsageError(
        "SyncBatchNorm cannot be used in join: a rank without inputs has no part in its "
        "statistics");
  }
  if (options_.skip_all_reduce_unused_params) {
    throw UsageError(
        "skip_all_reduce_unused_params cannot be used in join: a rank without inputs does not "
        "know which parameters the others use");
  }
  const int size = get_world_size(options_.process_group);
  const at::Tensor mine =
      at::tensor({static_cast<std::int64_t>(part), std::int64_t{broadcasts ? 1 : 0}}, at::kLong);
  at::Tensor all;
  parallel::with_error_context(kAgreeing,
                               [&] { all = parallel::gather(mine, options_.process_group); });
  const auto said = all.accessor<std::int64_t, 2>();
  shm::RankSet local;
  shm::RankSet synchronised;
  bool any_broadcasts = false;
  all_active_ = true;
  for (int rank = 0; rank < size; ++rank) {
    const int number = distributed::global_rank_of(options_.process_group, rank);
    const auto its_part = static_cast<Part>(said[rank][0]);
    if (its_part == Part::local) local.insert(number);
    if (its_part == Part::synchronised) synchronised.insert(number);
    if (its_part == Part::joined) {
      all_active_ = false;
    } else {
      buffer_source_ = rank;
    }
    any_broadcasts = any_broadcasts || said[rank][1] != 0;
  }
  if (!local.empty() && !synchronised.empty()) {
    const bool fewer = local.count() < synchronised.count();
    throw Mismatch(fmt::format("in a step of join, {} ran the forward under no_sync and {} did "
                               "not: in join all ranks must accumulate over the same steps",
                               shm::describe_ranks(local), shm::describe_ranks(synchronised)),
                   (fewer ? local : synchronised).list(), "forward", steps_);
  }
  return {!synchronised.empty(), any_broadcasts};
}

void DdpCore::check_loop() const {
  if (!logical_ranks_->in_loop()) {
    throw UsageError(
        LogicalRanksCore::is_any_in_loop()
            ? "this loop is over the logical ranks of another model: run a training forward of "
              "this one inside a loop over its own"
            : "with logical_ranks, run a training forward inside a loop over logical_ranks(); run "
              "one without a backward under NoGradGuard (torch.no_grad())");
  }
  if (join() != nullptr) {
    throw UsageError(
        "logical_ranks cannot be used in join: give every logical rank as many batches "
        "(DistributedSampler), or one without samples set_samples(0)");
  }
}

// Rarely, as it walks through the module.
void DdpCore::check_parameters() {
  if (!std::has_single_bit(++forwards_)) return;
  const auto now = model_.parameters();
  if (now.size() != wrapped_.size()) {
    throw UsageError(
        fmt::format("the module has {} parameters and had {} when it was wrapped: "
                    "wrap it after it is complete",
                    now.size(), wrapped_.size()));
  }
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (now[i].tensor.is_same(wrapped_[i])) continue;
    throw UsageError(
        fmt::format("parameter {} is another tensor than when the module was wrapped: replace "
                    "layers first, then wrap it",
                    now[i].name));
  }
}

// Counts the step. Not with ranks that have joined: they get the model later.
bool DdpCore::is_check_due() {
  ++steps_;
  const auto every = static_cast<std::uint64_t>(options_.check_sync_every);
  return every != 0 && steps_ % every == 0 && all_active_;
}

void DdpCore::check_models(bool with_buffers) {
  auto tensors = model_.parameters();
  if (with_buffers) {
    const auto buffers = model_.buffers();
    tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  }
  parallel::with_error_context(
      "comparing the ranks' models before a forward (check_sync_every)",
      [&] { ddp::check_same_values(tensors, options_.process_group, steps_); });
}

}  // namespace paceline::detail
