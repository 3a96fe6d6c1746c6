#include <paceline/lr_scheduler.h>

#include <torch/optim/optimizer.h>

#include <utility>

#include "optim/schedule.h"

namespace paceline::optim {
namespace {

std::unique_ptr<Schedule> begun(torch::optim::Optimizer& optimizer,
                                const ScheduleOptions& options) {
  std::vector<double> initial_lrs = learning_rates(optimizer);
  auto schedule = make_schedule(optimizer, initial_lrs, options);
  schedule->begin();
  return schedule;
}

}  // namespace

LRScheduler::LRScheduler(std::unique_ptr<Schedule> schedule) : schedule_(std::move(schedule)) {}
LRScheduler::~LRScheduler() = default;
LRScheduler::LRScheduler(LRScheduler&& other) noexcept = default;
LRScheduler& LRScheduler::operator=(LRScheduler&& other) noexcept = default;

void LRScheduler::step() {
  schedule_->step();
}

std::vector<double> LRScheduler::get_last_lr() const {
  return schedule_->last_lr();
}

std::int64_t LRScheduler::last_epoch() const {
  return schedule_->last_epoch();
}

at::IValue LRScheduler::state_dict() const {
  StateArchive state(schedule_->name());
  schedule_->clone()->visit(state);
  return state.dict();
}

void LRScheduler::load_state_dict(const at::IValue& state) {
  StateArchive archive(schedule_->name(), state);
  auto loaded = schedule_->clone();
  loaded->visit(archive);
  schedule_ = std::move(loaded);
}

StepLR::StepLR(torch::optim::Optimizer& optimizer, const StepLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
MultiStepLR::MultiStepLR(torch::optim::Optimizer& optimizer, const MultiStepLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
ConstantLR::ConstantLR(torch::optim::Optimizer& optimizer, const ConstantLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
LinearLR::LinearLR(torch::optim::Optimizer& optimizer, const LinearLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
PolynomialLR::PolynomialLR(torch::optim::Optimizer& optimizer, const PolynomialLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
CosineAnnealingLR::CosineAnnealingLR(torch::optim::Optimizer& optimizer,
                                     const CosineAnnealingLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLROptions& options)
    : LRScheduler(begun(optimizer, options)) {}
SequentialLR::SequentialLR(torch::optim::Optimizer& optimizer, const SequentialLROptions& options)
    : LRScheduler(make_sequential(optimizer, options)) {}

}  // namespace paceline::optim
