#include "report/analysis/replay.h"

#include <algorithm>
#include <utility>

namespace paceline::report {
namespace {

// A step in which ranks waited for cores for no more than this part is undisturbed.
constexpr double kUndisturbed = 0.02;
// With so many undisturbed steps, their median communication is known.
constexpr std::size_t kEnoughUndisturbed = 5;
// Otherwise the fastest tenth of all steps comes closest.
constexpr double kFastest = 0.1;

double quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  const auto at =
      values.begin() + static_cast<std::ptrdiff_t>(part * static_cast<double>(values.size() - 1));
  std::ranges::nth_element(values, at);
  return *at;
}

double mean(double sum, std::size_t count) {
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

}  // namespace

double Replay::ModelStep::lasts() const {
  double longest = 0;
  for (const BusyRank& rank : ranks) longest = std::max(longest, rank.busy());
  return longest + communication;
}

Replay::BusyRank Replay::busy_rank(const RankStep& step) {
  BusyRank rank{.computing = std::max(0.0, step.computing()), .between = step.between};
  rank.queued_between = std::min(step.thread_between.queued, rank.between);
  rank.queued = step.thread.queued - rank.queued_between;
  rank.waiting_between =
      std::max(0.0, rank.between - rank.queued_between - step.thread_between.cpu);
  return rank;
}

Replay::Replay(const std::vector<Step>& steps) {
  double periods = 0;
  for (const Step& step : steps) {
    ModelStep& model = steps_.emplace_back();
    double communication = 0;
    for (const RankStep& rank : step.ranks) {
      model.ranks.push_back(busy_rank(rank));
      communication += rank.communication();
      model.queued |= rank.thread.queued > kUndisturbed * rank.period.length();
    }
    model.communication = mean(communication, step.ranks.size());
    periods += step.period();
  }
  divide_queue();
  unexplained_ = mean(periods, steps.size()) - modelled();
}

// The time in the queue is part of communication as far as that lasts longer than usual, and
// otherwise of computing.
void Replay::divide_queue() {
  const double usual = undisturbed_communication();
  for (ModelStep& step : steps_) {
    const double delay = std::max(0.0, step.communication - usual);
    for (BusyRank& rank : step.ranks) {
      rank.queued = std::clamp(rank.queued - delay, 0.0, rank.computing);
    }
  }
}

double Replay::modelled() const {
  double sum = 0;
  for (const ModelStep& step : steps_) sum += step.lasts();
  return mean(sum, steps_.size());
}

double Replay::period() const {
  return std::max(0.0, modelled() + unexplained_);
}

double Replay::communication() const {
  double sum = 0;
  for (const ModelStep& step : steps_) sum += step.communication;
  const double all = period();
  return all > 0 ? mean(sum, steps_.size()) / all : 0;
}

Stall Replay::stall(const std::vector<int>& ranks) const {
  Stall stall;
  double sum = 0;
  for (const ModelStep& step : steps_) {
    const auto last = std::ranges::max_element(step.ranks, {}, &BusyRank::busy);
    double late = 0;
    for (const BusyRank& rank : step.ranks) late += last->busy() - rank.busy();
    late = step.ranks.size() > 1 ? mean(late, step.ranks.size() - 1) : 0;
    if (late == 0) continue;
    stall.causes[ranks[static_cast<std::size_t>(last - step.ranks.begin())]] += late;
    sum += late;
  }
  for (auto& [rank, share] : stall.causes) share /= sum;
  const double all = period();
  stall.share = all > 0 ? mean(sum, steps_.size()) / all : 0;
  return stall;
}

template <typename Change>
Replay Replay::changed(Change change) const {
  Replay other = *this;
  for (ModelStep& step : other.steps_) change(step);
  return other;
}

double Replay::undisturbed_communication() const {
  std::vector<double> all;
  std::vector<double> undisturbed;
  for (const ModelStep& step : steps_) {
    all.push_back(step.communication);
    if (!step.queued) undisturbed.push_back(step.communication);
  }
  return undisturbed.size() >= kEnoughUndisturbed ? quantile(std::move(undisturbed), 0.5)
                                                  : quantile(std::move(all), kFastest);
}

Replay Replay::without_queue() const {
  const double communication = undisturbed_communication();
  return changed([=](ModelStep& step) {
    for (BusyRank& rank : step.ranks) {
      rank.computing -= std::exchange(rank.queued, 0);
      rank.between -= std::exchange(rank.queued_between, 0);
    }
    if (step.queued) step.communication = std::min(step.communication, communication);
  });
}

Replay Replay::with_usual_computing(std::size_t index) const {
  return changed([=](ModelStep& step) {
    std::vector<double> others;
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      if (i != index) others.push_back(step.ranks[i].computing);
    }
    if (!others.empty()) step.ranks[index].computing = quantile(std::move(others), 0.5);
  });
}

Replay Replay::with_usual_between(std::size_t index) const {
  return changed([=](ModelStep& step) {
    std::vector<double> others;
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      if (i != index) others.push_back(step.ranks[i].between);
    }
    if (!others.empty()) step.ranks[index].between = quantile(std::move(others), 0.5);
  });
}

Replay Replay::with_even_computing() const {
  return changed([](ModelStep& step) {
    double sum = 0;
    for (const BusyRank& rank : step.ranks) sum += rank.computing;
    for (BusyRank& rank : step.ranks) rank.computing = mean(sum, step.ranks.size());
  });
}

Replay Replay::with_communication(double part) const {
  return changed([=](ModelStep& step) { step.communication *= part; });
}

Replay Replay::without_waiting_between() const {
  return changed([](ModelStep& step) {
    for (BusyRank& rank : step.ranks) rank.between -= rank.waiting_between;
  });
}

double Replay::period_of_batch(std::size_t count) const {
  double sum = 0;
  std::size_t batches = 0;
  for (; batches + count <= steps_.size(); batches += count) {
    ModelStep together{.ranks = std::vector<BusyRank>(steps_.front().ranks.size())};
    for (std::size_t i = batches; i < batches + count; ++i) {
      for (std::size_t rank = 0; rank < together.ranks.size(); ++rank) {
        together.ranks[rank].computing += steps_[i].ranks[rank].busy();
      }
      together.communication += mean(steps_[i].communication, count);
    }
    sum += together.lasts();
  }
  return batches > 0 ? std::max(0.0, mean(sum, batches) + unexplained_) : period();
}

}  // namespace paceline::report
