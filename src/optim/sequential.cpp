#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <algorithm>

#include <paceline/error.h>

#include "optim/schedule.h"

namespace paceline::optim {
namespace {

void check_milestones(const std::vector<std::int64_t>& milestones, std::size_t schedulers) {
  if (schedulers == 0) throw UsageError("SequentialLR: schedulers is empty; give at least one");
  if (milestones.size() + 1 != schedulers) {
    throw UsageError(fmt::format(
        "SequentialLR: {} milestones for {} schedulers; give one less than schedulers: where each "
        "but the first begins",
        milestones.size(), schedulers));
  }
  if (!std::ranges::is_sorted(milestones) || (!milestones.empty() && milestones[0] < 0)) {
    throw UsageError("SequentialLR: milestones must ascend, and must not be negative");
  }
}

class Sequential final : public Schedule {
 public:
  Sequential(torch::optim::Optimizer& optimizer, const SequentialLROptions& options);
  Sequential(const Sequential& other) : Schedule(other), milestones_(other.milestones_) {
    for (const auto& part : other.parts_) parts_.push_back(part->copy());
  }
  Sequential& operator=(const Sequential&) = delete;

  void step() override;
  std::unique_ptr<Schedule> clone() const override { return std::make_unique<Sequential>(*this); }
  void visit(StateArchive& state) override;

 private:
  // Which part an epoch belongs to.
  std::size_t part_at(std::int64_t epoch) const {
    return static_cast<std::size_t>(std::ranges::upper_bound(milestones_, epoch) -
                                    milestones_.begin());
  }

  std::vector<std::unique_ptr<EpochSchedule>> parts_;
  std::vector<std::int64_t> milestones_;
};

// In Python each schedule has begun when SequentialLR takes it, which is seen in its state only.
Sequential::Sequential(torch::optim::Optimizer& optimizer, const SequentialLROptions& options)
    : Schedule(optimizer, "SequentialLR"), milestones_(options.milestones) {
  check_milestones(milestones_, options.schedulers.size());
  std::vector<double> initial_lrs = learning_rates(optimizer);
  for (const ScheduleOptions& part : options.schedulers) {
    parts_.push_back(make_schedule(optimizer, initial_lrs, part));
  }
  for (const auto& part : parts_) part->begin();
  for (const auto& part : parts_) part->undo_begin();
  set_learning_rates(optimizer, initial_lrs);
  const auto& first = parts_[part_at(0)];
  first->begin();
  last_epoch_ = 0;
  last_lr_ = first->last_lr();
}

void Sequential::step() {
  const std::int64_t epoch = last_epoch_ + 1;
  const std::size_t index = part_at(epoch);
  EpochSchedule& part = *parts_[index];
  if (index > 0 && milestones_[index - 1] == epoch) {
    part.restart();
  } else {
    part.step();
  }
  last_epoch_ = epoch;
  last_lr_ = part.last_lr();
}

void Sequential::visit(StateArchive& state) {
  state("_milestones", milestones_);
  state("last_epoch", last_epoch_);
  visit_rates(state, "_last_lr", last_lr_);
  if (!state.reads()) {
    GenericList of_parts = empty_list();
    for (const auto& part : parts_) {
      StateArchive of_part(part->name());
      part->visit(of_part);
      of_parts.push_back(of_part.dict());
    }
    state.insert("_schedulers", of_parts);
    return;
  }
  const at::IValue of_parts = state.at("_schedulers");
  if (!of_parts.isList() || of_parts.toListRef().size() != parts_.size()) {
    state.reject(fmt::format("'_schedulers' must be a list of {}", parts_.size()));
  }
  check_milestones(milestones_, parts_.size());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    StateArchive of_part(parts_[i]->name(), of_parts.toListRef()[i]);
    parts_[i]->visit(of_part);
  }
}

}  // namespace

std::unique_ptr<Schedule> make_sequential(torch::optim::Optimizer& optimizer,
                                          const SequentialLROptions& options) {
  return std::make_unique<Sequential>(optimizer, options);
}

}  // namespace paceline::optim
