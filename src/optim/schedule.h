#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/lr_scheduler.h>

#include "optim/state_archive.h"

namespace paceline::optim {

// What is behind an LRScheduler.
class Schedule {
 public:
  virtual ~Schedule() = default;

  virtual void step() = 0;
  // For the same optimizer, with a state of its own.
  virtual std::unique_ptr<Schedule> clone() const = 0;
  // Reads or writes the state.
  virtual void visit(StateArchive& state) = 0;

  const std::string& name() const { return name_; }
  std::int64_t last_epoch() const { return last_epoch_; }
  const std::vector<double>& last_lr() const { return last_lr_; }

 protected:
  Schedule(torch::optim::Optimizer& optimizer, std::string name)
      : optimizer_(&optimizer), name_(std::move(name)) {}
  Schedule(const Schedule&) = default;
  Schedule& operator=(const Schedule&) = delete;

  torch::optim::Optimizer& optimizer() const { return *optimizer_; }
  // Reads or writes the learning rates of each group, which must be as many as now.
  void visit_rates(StateArchive& state, const char* name, std::vector<double>& rates) const;

  std::int64_t last_epoch_ = -1;
  std::vector<double> last_lr_;

 private:
  torch::optim::Optimizer* optimizer_;
  std::string name_;
};

// What the learning rate of a group is computed from.
struct RateInputs {
  // Which of Python's forms: its _initial_step, its chainable form, or its closed form at epoch 0.
  enum class Form { initial, next, closed };

  Form form;
  std::int64_t epoch;
  std::size_t group;
  double lr;       // the current one
  double base_lr;  // the first one
};

// A schedule by one formula.
class EpochSchedule : public Schedule {
 public:
  // Sets the learning rates of epoch 0.
  void begin();
  // SequentialLR undoes begin() before it chooses the schedule of epoch 0.
  void undo_begin() { --last_epoch_; }
  void step() override;
  // Begins at epoch 0 after other schedules.
  void restart() { advance(RateInputs::Form::closed, 0); }

  virtual std::unique_ptr<EpochSchedule> copy() const = 0;
  std::unique_ptr<Schedule> clone() const final { return copy(); }
  void visit(StateArchive& state) override;

 protected:
  EpochSchedule(torch::optim::Optimizer& optimizer, std::string name, std::vector<double> base_lrs)
      : Schedule(optimizer, std::move(name)), base_lrs_(std::move(base_lrs)) {}
  EpochSchedule(const EpochSchedule&) = default;

  virtual double lr_at(const RateInputs& at) const = 0;
  // Called once the learning rates are known.
  virtual void set_momenta(std::int64_t epoch) { static_cast<void>(epoch); }

  const std::vector<double>& base_lrs() const { return base_lrs_; }

 private:
  void advance(RateInputs::Form form, std::int64_t epoch);

  std::vector<double> base_lrs_;
  std::int64_t step_count_ = 0;
};

std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer);
void set_learning_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates);

// Makes a schedule that has not begun. `initial_lrs` are the first learning rates of the groups;
// OneCycleLR replaces them. Throws UsageError for invalid options.
std::unique_ptr<EpochSchedule> make_schedule(torch::optim::Optimizer& optimizer,
                                             std::vector<double>& initial_lrs,
                                             const ScheduleOptions& options);
std::unique_ptr<EpochSchedule> make_one_cycle(torch::optim::Optimizer& optimizer,
                                              std::vector<double>& initial_lrs,
                                              const OneCycleLROptions& options);
// Makes a schedule that has begun.
std::unique_ptr<Schedule> make_sequential(torch::optim::Optimizer& optimizer,
                                          const SequentialLROptions& options);

// Throws UsageError unless there is one value or one for each group.
void check_per_group(const char* name, std::size_t values, std::size_t groups);

}  // namespace paceline::optim
