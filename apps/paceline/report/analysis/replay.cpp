#include "report/analysis/replay.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "report/analysis/analysis.h"

namespace paceline::report {
namespace {

// A step in which ranks waited for cores for no more than this part is undisturbed.
constexpr double kUndisturbed = 0.02;
// With so many undisturbed steps, their median communication is known.
constexpr std::size_t kEnoughUndisturbed = 5;
// Otherwise the fastest tenth of all steps comes closest.
constexpr double kFastest = 0.1;

double fastest_tenth(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto last = static_cast<double>(values.size() - 1);
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(kFastest * last);
  std::ranges::nth_element(values, at);
  return *at;
}

double mean(double sum, std::size_t count) {
  return count > 0 ? sum / static_cast<double>(count) : 0;
}

}  // namespace

double Replay::ModelStep::last_published() const {
  double last = 0;
  for (const BusyRank& rank : ranks) last = std::max(last, rank.published());
  return last;
}

double Replay::ModelStep::lasts() const {
  return std::max(last_published() + communication, longest());
}

double Replay::ModelStep::longest() const {
  double longest = 0;
  for (const BusyRank& rank : ranks) longest = std::max(longest, rank.busy());
  return longest;
}

double Replay::ModelStep::queued_elsewhere() const {
  double sum = 0;
  for (const BusyRank& rank : ranks) sum += rank.queued_elsewhere;
  return sum;
}

// `before` is the step whose time between steps came before this one. Sleep within this one counts
// as if it came before it, too.
Replay::BusyRank Replay::busy_rank(const RankStep& step, const RankStep& before) {
  BusyRank rank{.computing = std::max(0.0, step.computing()),
                .between = before.between + step.asleep};
  rank.queued_between = std::min(before.thread_between.queued, before.between);
  rank.waiting_between =
      step.asleep + std::max(0.0, before.between - rank.queued_between - before.thread_between.cpu);
  // While it waits for a late rank it may queue as well, unless it sleeps; nobody waits for that.
  const double queued = step.thread.queued - step.thread_between.queued;
  const double cpu = step.thread.cpu - step.thread_between.cpu;
  const double awake_in_waits = std::max(0.0, cpu + queued - rank.computing);
  rank.queued = std::max(0.0, queued - std::min(step.late(), awake_in_waits));
  return rank;
}

Replay::Replay(const std::vector<Step>& steps) {
  double periods = 0;
  const Step* last = nullptr;
  for (const Step& step : steps) {
    const Step& before = last != nullptr && last->number + 1 == step.number ? *last : step;
    ModelStep& model = steps_.emplace_back();
    double period = step.period();
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      const RankStep& rank = step.ranks[i];
      model.ranks.push_back(busy_rank(rank, before.ranks[i]));
      model.communication += mean(rank.communication(), step.ranks.size());
      model.queued |= rank.thread.queued > kUndisturbed * rank.period.length();
      period += mean(before.ranks[i].between - rank.between, step.ranks.size());
    }
    model.last_rank = step.last_rank();
    model.spare = std::numeric_limits<double>::max();
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      const double late = step.ranks[i].late();
      BusyRank& rank = model.ranks[i];
      rank.offset = period - model.communication - late - rank.busy();
      model.spare = std::min(model.spare, late);
    }
    periods += step.period();
    last = &step;
  }
  divide_queue();
  double modelled = 0;
  for (const ModelStep& step : steps_) modelled += step.lasts();
  unexplained_ = mean(periods - modelled, steps.size());
}

// The time in the queue is part of communication as far as that lasts longer than usual, and
// otherwise of computing.
void Replay::divide_queue() {
  const double usual = undisturbed_communication();
  for (ModelStep& step : steps_) {
    const double delay = std::max(0.0, step.communication - usual);
    for (BusyRank& rank : step.ranks) {
      rank.queued_elsewhere = std::min(rank.queued, delay);
      rank.queued = std::min(rank.queued - rank.queued_elsewhere, rank.computing);
    }
  }
}

double Replay::period() const {
  double modelled = 0;
  double longest = 0;
  for (const ModelStep& step : steps_) {
    modelled += step.lasts();
    longest += step.longest();
  }
  return period_of(mean(modelled, steps_.size()), mean(longest, steps_.size()));
}

// What the model does not explain may make a step shorter, but not shorter than the work in it.
double Replay::period_of(double modelled, double longest) const {
  return std::max(modelled + unexplained_, longest);
}

Waiting Replay::waiting(const std::vector<int>& ranks) const {
  Waiting all;
  for (const ModelStep& step : steps_) {
    const double published = step.last_published();
    const auto late = [&](std::size_t i) {
      return published - step.ranks[i].published() + step.spare;
    };
    std::size_t last = 0;
    double sum = 0;
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      // If several are, the one that the others waited for.
      if (late(i) < late(last) || (late(i) == late(last) && ranks[i] == step.last_rank)) last = i;
      sum += late(i);
      all.between += mean(step.ranks[i].between, step.ranks.size() * steps_.size());
    }
    all.communication += mean(step.communication, steps_.size());
    const double others = step.ranks.size() > 1 ? mean(sum - late(last), step.ranks.size() - 1) : 0;
    if (others <= 0) continue;
    all.stall += mean(others, steps_.size());
    all.stall_causes[ranks[last]] += mean(others, steps_.size());
  }
  for (auto& [rank, share] : all.stall_causes) share /= all.stall;
  return all;
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
  return undisturbed.size() >= kEnoughUndisturbed ? median(std::move(undisturbed))
                                                  : fastest_tenth(std::move(all));
}

// Ranks may queue one after the other.
Replay Replay::without_queue() const {
  const double usual = undisturbed_communication();
  return changed([=](ModelStep& step) {
    const double delay = std::max(0.0, step.communication - usual);
    step.communication -= std::min(delay, step.queued_elsewhere());
    for (BusyRank& rank : step.ranks) {
      rank.computing -= std::exchange(rank.queued, 0);
      rank.between -= std::exchange(rank.queued_between, 0);
    }
  });
}

Replay Replay::with_usual(double BusyRank::*what, std::size_t index) const {
  return changed([=](ModelStep& step) {
    std::vector<double> others;
    for (std::size_t i = 0; i < step.ranks.size(); ++i) {
      if (i != index) others.push_back(step.ranks[i].*what);
    }
    if (!others.empty()) step.ranks[index].*what = median(std::move(others));
  });
}

Replay Replay::with_usual_computing(std::size_t index) const {
  return with_usual(&BusyRank::computing, index);
}

Replay Replay::with_usual_between(std::size_t index) const {
  return with_usual(&BusyRank::between, index);
}

Replay Replay::with_part_of_computing(const std::vector<double>& parts) const {
  return changed([&](ModelStep& step) {
    for (std::size_t i = 0; i < step.ranks.size(); ++i) step.ranks[i].computing *= parts[i];
  });
}

Replay Replay::with_even(double BusyRank::*what) const {
  return changed([=](ModelStep& step) {
    double sum = 0;
    for (const BusyRank& rank : step.ranks) sum += rank.*what;
    for (BusyRank& rank : step.ranks) rank.*what = mean(sum, step.ranks.size());
  });
}

Replay Replay::with_even_computing() const {
  return with_even(&BusyRank::computing);
}

Replay Replay::with_even_between() const {
  return with_even(&BusyRank::between);
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
  double modelled = 0;
  double longest = 0;
  std::size_t batches = 0;
  for (; batches + count <= steps_.size(); batches += count) {
    ModelStep together{.ranks = std::vector<BusyRank>(steps_.front().ranks.size())};
    for (std::size_t i = batches; i < batches + count; ++i) {
      for (std::size_t rank = 0; rank < together.ranks.size(); ++rank) {
        together.ranks[rank].computing += steps_[i].ranks[rank].busy();
        together.ranks[rank].offset += steps_[i].ranks[rank].offset;
      }
      together.communication += mean(steps_[i].communication, count);
    }
    modelled += together.lasts();
    longest += together.longest();
  }
  return batches > 0 ? period_of(mean(modelled, batches), mean(longest, batches)) : period();
}

}  // namespace paceline::report
