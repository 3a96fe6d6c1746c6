#pragma once

/// @file
/// Schedules of learning rates, with the values and the states of Python's
/// torch.optim.lr_scheduler.

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <paceline/api.h>

namespace torch::optim {
class Optimizer;
}

namespace paceline::optim {

class Schedule;

/// Sets the learning rates of an optimizer's groups. Call step() after the optimizer's steps of an
/// epoch, or after each step, whichever unit the options count:
///
///     optim::CosineAnnealingLR schedule(sgd, {.T_max = epochs});
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       ...
///       schedule.step();
///     }
///
/// Construction sets the learning rates of epoch 0. They start from the rates that the optimizer
/// has then. As in Python, most schedules compute the next rate from the current one, so several of
/// them, or the program, may change the rates of one optimizer.
///
/// The optimizer is not owned: it must outlive the schedule and keep its address and its number of
/// groups. Only construction and step() change it. Use both on one thread at a time.
class PACELINE_API LRScheduler {
 public:
  virtual ~LRScheduler();
  /// `other` may only be assigned to or destroyed afterwards.
  LRScheduler(LRScheduler&& other) noexcept;
  /// The same.
  LRScheduler& operator=(LRScheduler&& other) noexcept;

  /// Sets the learning rates of the next epoch. Throws UsageError, and changes nothing, if the
  /// optimizer has another number of groups than at construction, or if a OneCycleLR has ended.
  void step();
  /// The learning rate of each group that this schedule set last.
  std::vector<double> get_last_lr() const;
  /// The number of the current epoch, from 0.
  std::int64_t last_epoch() const;

  /// The state, a dict with the keys of Python's. It includes the options, and no functions.
  ///
  /// Python loads it, with two exceptions. Python keeps the bounds of a OneCycleLR in the groups of
  /// the optimizer, which states of C++'s optimizers do not have: keep these keys of the groups
  /// when you load such a state; and one from Python changes none here, so make the OneCycleLR with
  /// the same bounds. And `milestones` of a MultiStepLR is a dict, where Python's
  /// SequentialLR needs a `collections.Counter`.
  at::IValue state_dict() const;
  /// Goes on as the schedule that had this state: it replaces the options. The learning rates and
  /// momenta themselves are in the optimizer, as in Python: load its state too, before or after.
  /// Throws Error or UsageError, and changes nothing, if the state is of another schedule or number
  /// of groups, or if an option in it is invalid.
  void load_state_dict(const at::IValue& state);

 protected:
  /// For the classes below.
  explicit LRScheduler(std::unique_ptr<Schedule> schedule);

 private:
  std::unique_ptr<Schedule> schedule_;
};

/// Options of StepLR.
struct StepLROptions {
  std::int64_t step_size = 0;  ///< Epochs from one decay to the next; at least 1, so to be set.
  double gamma = 0.1;          ///< What the rates are multiplied by.
};
/// Multiplies the learning rates by gamma every step_size epochs.
class PACELINE_API StepLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option.
  StepLR(torch::optim::Optimizer& optimizer, const StepLROptions& options);
};

/// Options of MultiStepLR.
struct MultiStepLROptions {
  /// At which epochs; not negative. One that comes twice counts twice.
  std::vector<std::int64_t> milestones{};
  double gamma = 0.1;  ///< What the rates are multiplied by.
};
/// Multiplies the learning rates by gamma at given epochs.
class PACELINE_API MultiStepLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option.
  MultiStepLR(torch::optim::Optimizer& optimizer, const MultiStepLROptions& options);
};

/// Options of ConstantLR.
struct ConstantLROptions {
  double factor = 1.0 / 3;       ///< What the rates are multiplied by; in (0, 1].
  std::int64_t total_iters = 5;  ///< The epoch that ends it; not negative.
};
/// Multiplies the learning rates by a factor until an epoch.
class PACELINE_API ConstantLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option.
  explicit ConstantLR(torch::optim::Optimizer& optimizer, const ConstantLROptions& options = {});
};

/// Options of LinearLR.
struct LinearLROptions {
  double start_factor = 1.0 / 3;  ///< The factor of epoch 0; in (0, 1].
  double end_factor = 1.0;        ///< The factor from epoch total_iters on; in [0, 1].
  std::int64_t total_iters = 5;   ///< The epoch with the last change; not negative.
};
/// Multiplies the learning rates by a factor that changes linearly, as for a warm-up.
class PACELINE_API LinearLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option.
  explicit LinearLR(torch::optim::Optimizer& optimizer, const LinearLROptions& options = {});
};

/// Options of PolynomialLR.
struct PolynomialLROptions {
  std::int64_t total_iters = 5;  ///< The epoch at which the rates are 0; not negative.
  double power = 1.0;            ///< The polynomial's power; not negative.
};
/// Multiplies the learning rates by (1 - epoch / total_iters) to a power.
class PACELINE_API PolynomialLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option.
  explicit PolynomialLR(torch::optim::Optimizer& optimizer,
                        const PolynomialLROptions& options = {});
};

/// Options of CosineAnnealingLR.
struct CosineAnnealingLROptions {
  std::int64_t T_max = 0;  ///< The epoch of the lowest rate; at least 1, so to be set.
  double eta_min = 0.0;    ///< The lowest rate.
};
/// Lowers the learning rates along half a cosine to eta_min, without restarts.
class PACELINE_API CosineAnnealingLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option.
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, const CosineAnnealingLROptions& options);
};

/// Options of OneCycleLR. A vector has one value for all groups, or one for each.
struct OneCycleLROptions {
  std::vector<double> max_lr{};  ///< The highest rates; to be set.
  /// The number of steps. Unset: epochs * steps_per_epoch, both of which must be set then.
  std::optional<std::int64_t> total_steps = std::nullopt;
  std::optional<std::int64_t> epochs = std::nullopt;           ///< See total_steps.
  std::optional<std::int64_t> steps_per_epoch = std::nullopt;  ///< See total_steps.
  double pct_start = 0.3;               ///< The share of the steps in which the rates rise.
  std::string anneal_strategy = "cos";  ///< How rates change: "cos" or "linear".
  /// Whether the momentum, or beta1 of Adam and AdamW, changes against the rates.
  bool cycle_momentum = true;
  std::vector<double> base_momentum{0.85};  ///< The lowest momenta.
  std::vector<double> max_momentum{0.95};   ///< The highest momenta.
  double div_factor = 25.0;                 ///< The first rates are max_lr / div_factor.
  double final_div_factor = 1e4;            ///< The last rates are the first ones divided by this.
  /// Whether the rates first fall as they rose, and then on to the last ones.
  bool three_phase = false;
};
/// Raises the learning rates to max_lr and lowers them to less than before, once in a training.
/// step() is for each step. The rates that the optimizer had do not count.
class PACELINE_API OneCycleLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option, and for cycle_momentum with an optimizer other than
  /// SGD, RMSprop, Muon, Adam and AdamW.
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options);
};

/// Options of LambdaLR.
struct LambdaLROptions {
  /// A factor for each epoch, of all groups or of each. Copied, and called by the constructor and
  /// by step().
  std::vector<std::function<double(std::int64_t)>> lr_lambda{};
};
/// Multiplies the first learning rates by a function of the epoch.
class PACELINE_API LambdaLR : public LRScheduler {
 public:
  /// Throws UsageError if there are not as many functions as groups, or one.
  LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLROptions& options);
};

/// A part of a SequentialLR.
using ScheduleOptions =
    std::variant<StepLROptions, MultiStepLROptions, ConstantLROptions, LinearLROptions,
                 PolynomialLROptions, CosineAnnealingLROptions, OneCycleLROptions, LambdaLROptions>;

/// Options of SequentialLR.
struct SequentialLROptions {
  std::vector<ScheduleOptions> schedulers{};  ///< One after the other; at least one.
  /// At which epochs the second, third, ... begins, with its own epoch 0; ascending.
  std::vector<std::int64_t> milestones{};
};
/// Follows one schedule after the other, such as a warm-up and then a cosine:
///
///     optim::SequentialLR schedule(
///         sgd, {.schedulers = {optim::LinearLROptions{.total_iters = 5},
///                              optim::CosineAnnealingLROptions{.T_max = 95}},
///               .milestones = {5}});
///
/// It makes the schedules itself, where Python takes them: options of an optimizer in C++ have no
/// place for the first learning rate, from which all of them start.
class PACELINE_API SequentialLR : public LRScheduler {
 public:
  /// Throws UsageError for an invalid option, and unless there is one milestone less than
  /// schedulers.
  SequentialLR(torch::optim::Optimizer& optimizer, const SequentialLROptions& options);
};

}  // namespace paceline::optim
