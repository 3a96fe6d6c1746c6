#include <paceline/power_sgd.h>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "parallel/comm_hooks/numpy_random.h"
#include "parallel/comm_hooks/orthogonalize.h"
#include "parallel/comm_hooks/running_hook.h"

namespace paceline::comm_hooks {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using StateDict = c10::impl::GenericDict;

WorkPtr sum_up(const at::Tensor& tensor, const ProcessGroup& group) {
  std::vector<at::Tensor> tensors{tensor};
  return group.c10d()->getBackend(tensor.device().type())->allreduce(tensors);
}

// Cuts the next tensor of this shape off a flat one, from element `begin` on.
at::Tensor cut(const at::Tensor& flat, std::int64_t& begin, at::IntArrayRef shape) {
  const std::int64_t count = c10::multiply_integers(shape);
  begin += count;
  return flat.narrow(0, begin - count, count).view(shape);
}

// On the CPU, whose random numbers are the same everywhere.
at::Tensor random_like(const at::Tensor& q, const at::Generator& generator) {
  return at::randn(q.sizes(), generator, at::device(at::kCPU).dtype(q.scalar_type()));
}

// Returns what `state` has by this name. Throws Error if it is not of the kind that `is` expects.
template <typename Is>
at::IValue member(const StateDict& state, const char* name, Is is) {
  const auto found = state.find(name);
  if (found != state.end() && is(found->value())) return found->value();
  throw Error(fmt::format(
      "PowerSgdState::load_state_dict: the state's {} is {}; load what state_dict returned", name,
      found == state.end() ? "missing" : "a " + found->value().tagKind()));
}

void check(const PowerSgdOptions& options) {
  const auto require = [](bool is_right, const char* name, auto value, const char* allowed) {
    if (!is_right) throw UsageError(fmt::format("{} of {}: it must be {}", name, value, allowed));
  };
  require(options.matrix_approximation_rank >= 1, "matrix_approximation_rank",
          options.matrix_approximation_rank, "at least 1");
  require(options.start_power_sgd_iter >= 0, "start_power_sgd_iter", options.start_power_sgd_iter,
          "non-negative");
  require(options.min_compression_rate > 0, "min_compression_rate", options.min_compression_rate,
          "positive");
  require(options.orthogonalization_epsilon >= 0, "orthogonalization_epsilon",
          options.orthogonalization_epsilon, "non-negative");
}

// For a tensor on `device`. A callback of a call runs on a stream of its own; a wait for such a
// future also waits for that stream.
FuturePtr make_future(c10::Device device) {
  std::vector<c10::Device> devices;
  if (!device.is_cpu()) devices.push_back(device);
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
}

}  // namespace

// All but `complete` runs on the thread of the backward, so that all ranks make their calls in one
// order.
class PowerSgdState::Impl : public std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(const PowerSgdOptions& options) : options_(options), random_(options.random_seed) {
    check(options);
  }

  void claim() {
    if (std::exchange(claimed_, true)) {
      throw UsageError(
          "power_sgd: this PowerSgdState has a hook already; each model needs a state of its own");
    }
  }

  FuturePtr run(c10d::GradBucket& bucket);

  CompressionStats stats() const { return stats_; }
  at::IValue state_dict() const;
  void load_state_dict(const at::IValue& value);

 private:
  // What is kept of a parameter between steps.
  struct Memory {
    at::Tensor error;  // in the gradient's shape as a matrix, 1 x n x m; undefined before the first
    at::Tensor q;      // 1 x m x r; the same
    at::Tensor spare;  // random numbers for columns of zeros in q; undefined before their first use
  };

  // A gradient sent as P Q^T.
  struct LowRank {
    std::size_t parameter;
    Memory* memory;
    at::Tensor matrix;  // 1 x n x m, in the bucket
    at::Tensor p{};     // 1 x n x r, in Sending::first
    at::Tensor q{};     // 1 x m x r, in Sending::qs
    std::int64_t rank;
  };

  // A bucket under way.
  struct Sending {
    ProcessGroup group;
    at::Tensor bucket;
    std::vector<at::Tensor> whole{};  // gradients in the bucket that are not compressed
    std::vector<LowRank> low_rank{};
    at::Tensor first{};  // what the first all-reduce adds up: `whole`, then the Ps
    at::Tensor qs{};
    WorkPtr work{};  // that all-reduce
    FuturePtr result = make_future(bucket.device());
  };

  // Where a bucket's `first` and `qs` are kept from step to step.
  struct Buffers {
    std::vector<std::size_t> parameters;  // whose gradients are compressed, in their order in `qs`
    at::Tensor first;
    at::Tensor qs;
  };
  using SendingPtr = std::shared_ptr<Sending>;

  void end_step();
  SendingPtr divide(c10d::GradBucket& bucket, const RunningHook& running);
  bool pays(std::int64_t n, std::int64_t m, std::int64_t rank) const;
  void allocate(std::size_t bucket, Sending& sending);
  void begin_qs(const Sending& sending);
  void replace_zero_columns(Memory& memory, const at::Tensor& q) const;
  void send_qs();
  void complete(const Sending& sending) const;

  const PowerSgdOptions options_;
  bool claimed_ = false;
  NumpyRandom random_;
  std::int64_t iter_ = 0;
  bool in_step_ = false;
  CompressionStats stats_;
  std::map<std::size_t, Memory> memory_;    // by parameter
  std::map<std::size_t, Buffers> buffers_;  // by bucket
  SendingPtr sending_;                      // the bucket whose Qs are sent next
};

FuturePtr PowerSgdState::Impl::run(c10d::GradBucket& bucket) {
  const RunningHook& running = RunningHook::require("power_sgd");
  if (!std::exchange(in_step_, true)) {
    running.after_last([self = shared_from_this()] { self->end_step(); });
  }
  if (iter_ < options_.start_power_sgd_iter) return all_reduce(options_.process_group)(bucket);
  const at::NoGradGuard no_grad;
  send_qs();
  const SendingPtr sending = divide(bucket, running);
  allocate(bucket.getIndex(), *sending);
  std::int64_t begin = 0;
  for (const at::Tensor& gradient : sending->whole) {
    cut(sending->first, begin, gradient.sizes()).copy_(gradient);
  }
  for (const LowRank& one : sending->low_rank) {
    if (one.memory->error.defined()) one.matrix.add_(one.memory->error);
  }
  begin_qs(*sending);
  for (const LowRank& one : sending->low_rank) {
    at::Tensor p = one.p;
    at::bmm_out(p, one.matrix, one.q);
  }
  sending->work = sum_up(sending->first, sending->group);
  sending_ = sending;
  return sending->result;
}

void PowerSgdState::Impl::end_step() {
  in_step_ = false;
  const at::NoGradGuard no_grad;
  send_qs();
  ++iter_;
}

// Compressed gradients of one shape follow each other, as in PyTorch: Qs are drawn in this order.
auto PowerSgdState::Impl::divide(c10d::GradBucket& bucket, const RunningHook& running)
    -> SendingPtr {
  auto sending = std::make_shared<Sending>(Sending{
      .group = options_.process_group.value_or(running.group()), .bucket = bucket.getBuffer()});
  auto& low_rank = sending->low_rank;
  const auto gradients = bucket.getGradients();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    stats_.numel_before += gradient.numel();
    const std::int64_t n = gradient.dim() == 0 ? 1 : gradient.size(0);
    const std::int64_t m = n == 0 ? 0 : gradient.numel() / n;
    const auto rank = std::min<std::int64_t>({n, m, options_.matrix_approximation_rank});
    if (!pays(n, m, rank)) {
      stats_.numel_after += gradient.numel();
      sending->whole.push_back(gradient);
      continue;
    }
    stats_.numel_after += (n + m) * rank;
    const std::size_t parameter = running.parameters()[i];
    const at::Tensor matrix = gradient.view({1, n, m});
    const auto same = std::find_if(low_rank.rbegin(), low_rank.rend(), [&](const LowRank& one) {
      return one.matrix.sizes() == matrix.sizes();
    });
    low_rank.insert(
        same == low_rank.rend() ? low_rank.end() : same.base(),
        {.parameter = parameter, .memory = &memory_[parameter], .matrix = matrix, .rank = rank});
  }
  return sending;
}

bool PowerSgdState::Impl::pays(std::int64_t n, std::int64_t m, std::int64_t rank) const {
  return static_cast<double>((n + m) * rank) * options_.min_compression_rate <
         static_cast<double>(n * m);
}

// Places Ps and Qs in the bucket's memory.
void PowerSgdState::Impl::allocate(std::size_t bucket, Sending& sending) {
  std::vector<std::size_t> parameters;
  std::int64_t first = 0;
  std::int64_t qs = 0;
  for (const at::Tensor& gradient : sending.whole) first += gradient.numel();
  const std::int64_t whole = first;
  for (const LowRank& one : sending.low_rank) {
    parameters.push_back(one.parameter);
    first += one.matrix.size(1) * one.rank;
    qs += one.matrix.size(2) * one.rank;
  }
  Buffers& buffers = buffers_[bucket];
  const auto type = sending.bucket.options();
  if (!buffers.first.defined() || buffers.first.numel() != first ||
      buffers.first.scalar_type() != sending.bucket.scalar_type() ||
      buffers.parameters != parameters) {
    buffers = {parameters, allocate_tensor({first}, type, sending.group),
               allocate_tensor({qs}, type, sending.group)};
  }
  sending.first = buffers.first;
  sending.qs = buffers.qs;
  std::int64_t in_first = whole;
  std::int64_t in_qs = 0;
  for (LowRank& one : sending.low_rank) {
    one.p = cut(sending.first, in_first, {1, one.matrix.size(1), one.rank});
    one.q = cut(sending.qs, in_qs, {1, one.matrix.size(2), one.rank});
    const auto fits = [&](const at::Tensor& tensor, at::IntArrayRef sizes) {
      return !tensor.defined() || tensor.sizes() == sizes;
    };
    if (fits(one.memory->error, one.matrix.sizes()) && fits(one.memory->q, one.q.sizes())) continue;
    throw UsageError(fmt::format(
        "the state that PowerSgdState loaded has other sizes for parameter {} (counted from 0): it "
        "is of another model or matrix_approximation_rank",
        one.parameter));
  }
}

// A column of zeros would stay zero in P and Q whatever the later gradients are. A gradient of
// zeros leaves such a Q behind. The spare columns are the same on all ranks, and in a resumed run.
// There is no branch on q's values, which may be on a device that still computes.
void PowerSgdState::Impl::replace_zero_columns(Memory& memory, const at::Tensor& q) const {
  if (!keeps_zero_columns(q)) return;
  if (!memory.spare.defined()) {
    const auto generator = at::detail::createCPUGenerator(options_.random_seed);
    memory.spare = random_like(q, generator).to(q.device());
  }
  q.copy_(at::where(q.eq(0).all(1, true), memory.spare, q));
}

// Each Q begins as in the step before, if all of the bucket's were there, or else as random numbers
// that are the same on all ranks.
void PowerSgdState::Impl::begin_qs(const Sending& sending) {
  if (sending.low_rank.empty()) return;
  const bool is_warm = std::ranges::all_of(
      sending.low_rank, [](const LowRank& one) { return one.memory->q.defined(); });
  std::optional<at::Generator> generator;
  if (!is_warm) generator = at::detail::createCPUGenerator(random_.below_1e9());
  for (const LowRank& one : sending.low_rank) {
    if (generator) {
      one.q.copy_(random_like(one.q, *generator));
    } else {
      if (one.memory->q.data_ptr() != one.q.data_ptr()) one.q.copy_(one.memory->q);
      replace_zero_columns(*one.memory, one.q);
    }
    if (options_.warm_start) one.memory->q = one.q;
    orthogonalize(one.q, options_.orthogonalization_epsilon);
  }
}

// Continues the bucket that was sent last.
void PowerSgdState::Impl::send_qs() {
  const SendingPtr sending = std::exchange(sending_, nullptr);
  if (!sending) return;
  sending->work->wait();
  std::int64_t begin = 0;
  for (const at::Tensor& gradient : sending->whole) {
    const at::Tensor sum = cut(sending->first, begin, gradient.sizes());
    gradient.copy_(sum.div_(get_world_size(sending->group)));
  }
  if (sending->low_rank.empty()) return sending->result->markCompleted(sending->bucket);
  for (const LowRank& one : sending->low_rank) {
    orthogonalize(one.p, options_.orthogonalization_epsilon);
    at::Tensor q = one.q;
    at::bmm_out(q, one.matrix.transpose(1, 2), one.p);
  }
  sum_up(sending->qs, sending->group)
      ->getFuture()
      ->addCallback([self = shared_from_this(), sending](c10::ivalue::Future& sum) {
        try {
          if (sum.hasError()) std::rethrow_exception(sum.exception_ptr());
          self->complete(*sending);
          sending->result->markCompleted(sending->bucket);
        } catch (...) {
          sending->result->setError(std::current_exception());
        }
      });
}

// On any thread.
void PowerSgdState::Impl::complete(const Sending& sending) const {
  const at::NoGradGuard no_grad;
  sending.qs.div_(get_world_size(sending.group));
  for (const LowRank& one : sending.low_rank) {
    at::Tensor& error = one.memory->error;
    if (options_.use_error_feedback) {
      error = error.defined() ? error.copy_(one.matrix) : one.matrix.clone();
    }
    at::Tensor matrix = one.matrix;
    at::bmm_out(matrix, one.p, one.q.transpose(1, 2));
    if (options_.use_error_feedback) error.sub_(matrix);
  }
}

at::IValue PowerSgdState::Impl::state_dict() const {
  const auto empty = [] { return StateDict(c10::AnyType::get(), c10::AnyType::get()); };
  StateDict errors = empty();
  StateDict qs = empty();
  for (const auto& [parameter, memory] : memory_) {
    const auto number = static_cast<std::int64_t>(parameter);
    if (memory.error.defined()) errors.insert(number, memory.error.clone());
    if (memory.q.defined()) qs.insert(number, memory.q.clone());
  }
  StateDict state = empty();
  state.insert("iter", iter_);
  state.insert("random", random_.state());
  state.insert("errors", errors);
  state.insert("qs", qs);
  return state;
}

void PowerSgdState::Impl::load_state_dict(const at::IValue& value) {
  if (!value.isGenericDict()) {
    throw Error(fmt::format(
        "PowerSgdState::load_state_dict: the state is a {}; load what state_dict returned",
        value.tagKind()));
  }
  const StateDict state = value.toGenericDict();
  const auto is_count = [](const at::IValue& one) { return one.isInt() && one.toInt() >= 0; };
  const auto are_tensors = [&](const at::IValue& one) {
    if (!one.isGenericDict()) return false;
    const StateDict dict = one.toGenericDict();
    return std::all_of(dict.begin(), dict.end(), [&](const auto& entry) {
      return is_count(entry.key()) && entry.value().isTensor();
    });
  };
  const std::int64_t iter = member(state, "iter", is_count).toInt();
  NumpyRandom random(0);
  const auto is_random = [&](const at::IValue& one) {
    return one.isString() && random.set_state(one.toStringRef());
  };
  member(state, "random", is_random);
  std::map<std::size_t, Memory> memory;
  const auto load = [&](const char* name, at::Tensor Memory::*part) {
    for (const auto& entry : member(state, name, are_tensors).toGenericDict()) {
      memory[static_cast<std::size_t>(entry.key().toInt())].*part =
          entry.value().toTensor().clone();
    }
  };
  load("errors", &Memory::error);
  load("qs", &Memory::q);
  iter_ = iter;
  random_ = random;
  memory_ = std::move(memory);
}

PowerSgdState::PowerSgdState(const PowerSgdOptions& options)
    : impl_(std::make_shared<Impl>(options)) {}

CompressionStats PowerSgdState::compression_stats() const {
  return impl_->stats();
}
at::IValue PowerSgdState::state_dict() const {
  return impl_->state_dict();
}
void PowerSgdState::load_state_dict(const at::IValue& value) {
  impl_->load_state_dict(value);
}

CommHook power_sgd(const PowerSgdState& state) {
  state.impl_->claim();
  return [impl = state.impl_](GradBucket& bucket) { return impl->run(bucket); };
}

}  // namespace paceline::comm_hooks
