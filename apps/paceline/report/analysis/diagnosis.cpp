#include "report/analysis/diagnosis.h"

#include <fmt/format.h>

#include <algorithm>

#include "report/units.h"

namespace paceline::report {
namespace {

// Fewer say little about a run.
constexpr std::size_t kFewestSteps = 8;
// From these shares of the time on something is said to hold the run back. Below a tenth it would
// hardly be felt; the optimizer alone may well take a fifth, between steps.
constexpr double kNotable = 0.10;
constexpr double kNotableBetween = 0.25;
// The part of what was lost that must be due to one rank to call it slow. Of two equal ranks, each
// is last in half of the steps.
constexpr double kOneRank = 0.75;
// Waking a rank takes tens of microseconds, several times a step: in steps shorter than this, ranks
// that wait for a fifth of the time pay for meeting at all.
constexpr double kShortStep = 500;
constexpr double kNotablePreForwardSync = 0.20;

// What a rank does is slower by this, at least, if it waits for its core for so much of the time.
constexpr double kNotableQueue = 0.10;
// Of the cores, what a job uses that leaves nothing to others.
constexpr double kAllCores = 0.9;
// Bytes per microsecond that even a slow network moves.
constexpr double kSlowNetwork = 100;

class Diagnosis {
 public:
  explicit Diagnosis(const Analysis& analysis) : a_(analysis) {
    const auto last =
        std::ranges::max_element(a_.lost_to, {}, [](auto& one) { return one.second; });
    if (last == a_.lost_to.end()) return;
    last_rank_ = last->first;
    concentration_ = last->second;
  }

  Verdict judge() {
    if (a_.steps.size() < kFewestSteps) {
      too_few_steps();
      return std::move(v_);
    }
    const double late = a_.lost >= kNotable ? a_.lost : 0;
    const double communication = a_.communication >= kNotable ? a_.communication : 0;
    const double between = a_.between >= kNotableBetween ? a_.between : 0;
    const double pauses = a_.pause_share >= kNotableBetween ? a_.pause_share : 0;
    const double most = std::max({late, communication, between, pauses});
    const bool one_rank = concentration_ >= kOneRank && last_rank_ >= 0;
    const bool crowded = a_.cores > 0 && a_.local_size > a_.cores;
    const bool shares = a_.queued >= kNotableQueue && !crowded;
    const bool other_cause =
        most > 0 && (most == pauses || most == between || (most == late && one_rank));
    if (shares && !other_cause) {
      shared_cores();
    } else if (most == 0) {
      all_well();
    } else if (most == pauses) {
      pauses_found();
    } else if (most == between) {
      between_steps();
    } else if (most == late && one_rank) {
      one_rank_late();
    } else if (crowded) {
      too_many_ranks();
    } else if (a_.period < kShortStep && a_.late + a_.communication >= kNotablePreForwardSync) {
      short_steps();
    } else if (most == late) {
      uneven_load();
    } else {
      exposed_communication();
    }
    add_figures();
    return std::move(v_);
  }

 private:
  template <typename... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) {
    v_.sentence = fmt::format(format, std::forward<Args>(args)...);
  }
  template <typename... Args>
  void because(fmt::format_string<Args...> format, Args&&... args) {
    v_.why.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  void suggest(std::string remedy) { v_.remedies.push_back(std::move(remedy)); }

  const RankTimes* times_of(int rank) const {
    const auto found = std::ranges::find(a_.ranks, rank, &RankTimes::rank);
    return found == a_.ranks.end() ? nullptr : &*found;
  }
  double others(double RankTimes::*what) const {
    std::vector<double> values;
    for (const RankTimes& one : a_.ranks) {
      if (one.rank != last_rank_) values.push_back(one.*what);
    }
    return median(std::move(values));
  }
  // The bucket for which ranks wait longest, in the way that `what` says.
  const BucketTimes* worst(double BucketTimes::*what) const {
    const auto found = std::ranges::max_element(a_.buckets, {}, what);
    return found == a_.buckets.end() || (*found).*what == 0 ? nullptr : &*found;
  }
  static std::string described(const BucketTimes& bucket) {
    std::string text = fmt::format("bucket {}", bucket.number);
    if (bucket.info.bytes == 0) return text;
    text += fmt::format(" ({}", bytes_text(bucket.info.bytes));
    if (!bucket.info.parameters.empty()) text += ": " + bucket.info.parameters;
    return text + ")";
  }

  void too_few_steps();
  void all_well();
  void pauses_found();
  void between_steps();
  void one_rank_late();
  void too_many_ranks();
  void shared_cores();
  void short_steps();
  void uneven_load();
  void exposed_communication();
  void add_figures();

  const Analysis& a_;
  Verdict v_;
  int last_rank_ = -1;
  double concentration_ = 0;
};

void Diagnosis::too_few_steps() {
  v_.finding = Finding::too_few_steps;
  say("There are too few steps to judge: {} after {} of warm-up, and {} are needed.",
      a_.steps.size(), a_.warm_up, kFewestSteps);
  suggest("Let the program run for 20 steps or more; a rank that is killed loses the last ones.");
  if (a_.models == 0) {
    because(
        "No timeline has a step: a model in DistributedDataParallel has to be trained, and on "
        "more than one rank.");
  }
}

void Diagnosis::all_well() {
  v_.finding = Finding::all_well;
  const std::pair<double, const char*> rest[] = {{a_.late, "waiting for slower ranks"},
                                                 {a_.communication, "communication"},
                                                 {a_.between, "time between steps"}};
  const auto [share, what] = *std::ranges::max_element(rest);
  say("All is well: {} of the time is computing; most of the rest is {}, with {}.",
      share_text(a_.computing), what, share_text(share));
  suggest("To go faster, compute faster: OMP_NUM_THREADS, more ranks, a smaller model.");
}

void Diagnosis::pauses_found() {
  v_.finding = Finding::pauses;
  say("{} of the time goes by in {} long pause{} between steps.", share_text(a_.pause_share),
      a_.pauses, a_.pauses == 1 ? "" : "s");
  suggest("Evaluate and save checkpoints less often, or on all ranks at once, each its share.");
  suggest(
      "At the begin of an epoch, keep the data loader's workers instead of starting them anew.");
}

void Diagnosis::between_steps() {
  v_.finding = Finding::between_steps;
  say("{} of the time goes by between steps, in which a rank computes no forward or backward: {} "
      "of each step of {}.",
      share_text(a_.between), time_text(a_.between * a_.period), time_text(a_.period));
  because(
      "Between the end of one backward and the next forward lie the optimizer, the data loader, "
      "metrics and logging.");
  suggest("Give the data loader workers (num_workers), or more of them, and let them prefetch.");
  suggest("Time optimizer.step() alone: if it is most of it, larger batches make it rarer.");
  suggest("Log and compute metrics every so many steps; item() each step costs little on the CPU.");
}

void Diagnosis::one_rank_late() {
  const RankTimes* const slow = times_of(last_rank_);
  v_.rank = last_rank_;
  const BucketTimes* const bucket = worst(&BucketTimes::late);
  if (bucket != nullptr) v_.bucket = bucket->number;
  const std::string wait = fmt::format("the others wait for it {} a step, {} of their time",
                                       time_text(a_.lost_per_step), share_text(a_.lost));
  const double usual = others(&RankTimes::typical_computing);
  const double more = slow == nullptr ? 0 : slow->typical_computing - usual;
  const double later =
      slow == nullptr ? 0 : slow->typical_between - others(&RankTimes::typical_between);
  if (slow == nullptr) {
    v_.finding = Finding::straggler;
    say("Rank {} holds this run back: {}.", last_rank_, wait);
  } else if (more >= later) {
    v_.finding = Finding::straggler;
    say("Rank {} holds this run back: it computes {} a step where the others take {} ({:+.0f} %), "
        "and {}.",
        last_rank_, time_text(slow->typical_computing), time_text(usual),
        usual > 0 ? 100 * more / usual : 0, wait);
    suggest(
        fmt::format("Look at what else runs on rank {}'s cores, at its OMP_NUM_THREADS and at "
                    "its share of the cores.",
                    last_rank_));
    suggest("Compare its batches with the others': longer sequences, larger images.");
  } else {
    v_.finding = Finding::late_starter;
    say("Rank {} holds this run back: it begins its steps {} later than the others, and {}.",
        last_rank_, time_text(later), wait);
    suggest(
        fmt::format("Look for what rank {} alone does between steps: loading from a slower "
                    "disk, logging, saving, metrics.",
                    last_rank_));
  }
  if (slow != nullptr && slow->queued >= kNotableQueue) {
    because("Rank {} waits for a core {} of the time in which it has something to do.", last_rank_,
            share_text(slow->queued));
  }
  because("In what was lost by waiting for a late rank, rank {} has a part of {}.", last_rank_,
          share_text(concentration_));
  if (bucket != nullptr) because("They wait most for {}.", described(*bucket));
}

// What else they wait for cannot be told apart then.
void Diagnosis::too_many_ranks() {
  v_.finding = Finding::too_many_ranks;
  say("There are more ranks than cores: {} ranks take turns on {} core{}, and {} of their "
      "time goes by in waiting for each other.",
      a_.local_size, a_.cores, a_.cores == 1 ? "" : "s", share_text(a_.late + a_.communication));
  because(
      "A rank that waits for its turn on a core is late, or late with its part of a reduction.");
  suggest(
      fmt::format("Start no more ranks than there are cores, {}, with larger batches.", a_.cores));
  suggest("Accumulate gradients with no_sync: the ranks meet less often.");
}

void Diagnosis::shared_cores() {
  v_.finding = Finding::shared_cores;
  const std::string waits = fmt::format(
      "ranks wait for a core {} of the time in which they have something to do, and {} of the "
      "whole time for each other",
      share_text(a_.queued), share_text(a_.late + a_.communication));
  const bool own = a_.cores > 0 && a_.used_cores >= kAllCores * a_.cores;
  if (own) {
    say("The job's threads share too few cores: {}.", waits);
    suggest("Set a smaller OMP_NUM_THREADS: the threads of all ranks should not outnumber cores.");
  } else {
    say("The cores are shared with other work: {}.", waits);
    suggest("Look what else runs on the machine (top), and end it or keep it to other cores.");
    suggest("Start fewer ranks, or bind them to cores that nobody else uses (taskset, cpusets).");
  }
  if (a_.used_cores > 0 && a_.cores > 0) {
    because("The ranks use {:.1f} of {} cores in the mean of the whole run.", a_.used_cores,
            a_.cores);
  }
  because("A rank that waits for a core is late, or late with its part of a reduction.");
}

void Diagnosis::short_steps() {
  v_.finding = Finding::short_steps;
  say("The steps are too short: of {}, {} go by in ranks pre_forward_sync each other.",
      time_text(a_.period), share_text(a_.late + a_.communication));
  because("Waking a rank that sleeps takes tens of microseconds, however little there is to add.");
  suggest("Use a larger batch, so that more is computed in each step.");
  suggest("Accumulate gradients over several batches with no_sync.");
}

void Diagnosis::uneven_load() {
  v_.finding = Finding::uneven_load;
  const BucketTimes* const bucket = worst(&BucketTimes::late);
  if (bucket != nullptr) v_.bucket = bucket->number;
  say("The load is uneven, and which rank is late changes from step to step: the others wait {} a "
      "step, {} of their time.",
      time_text(a_.lost_per_step), share_text(a_.lost));
  because("No rank has three quarters of what was lost; rank {} has most, {}.", last_rank_,
          share_text(concentration_));
  suggest(
      "Make batches of equal cost: bucket sequences by length, or bound a batch by its tokens.");
  suggest("Accumulate gradients with no_sync: over several batches the differences even out.");
}

void Diagnosis::exposed_communication() {
  v_.finding = Finding::communication;
  const BucketTimes* const bucket = worst(&BucketTimes::communication);
  if (bucket == nullptr) {
    say("Communication is exposed: ranks wait {} of the time for gradients that all have handed "
        "over.",
        share_text(a_.communication));
  } else {
    v_.bucket = bucket->number;
    say("Communication is exposed: {} of the time is spent waiting for gradients that all ranks "
        "have handed over, most of it for bucket {}.",
        share_text(a_.communication), bucket->number);
    because("Longest waited for: {}.", described(*bucket));
  }
  because("{} of the communication was hidden behind backward.", share_text(a_.overlap));
  std::uint64_t bytes = 0;
  for (const BucketTimes& one : a_.buckets) bytes += one.info.bytes;
  const double transfer = static_cast<double>(bytes) / kSlowNetwork;
  if (bytes > 0 && 2 * transfer < a_.communication * a_.period) {
    because(
        "A step's gradients are {}, which even a slow network moves in {}: it is not their size "
        "that takes {} a step.",
        bytes_text(bytes), time_text(transfer), time_text(a_.communication * a_.period));
    suggest(
        "Look what else runs on the ranks' cores: a rank may be late with its part of the sum.");
    suggest("Accumulate gradients over several batches with no_sync: the ranks meet less often.");
    return;
  }
  // Gradients that are buckets of their own are so whatever the cap.
  const auto several = [](const BucketTimes& one) {
    return one.info.parameters.find(", ") != std::string::npos;
  };
  if (bucket != nullptr && several(*bucket) && 2 * bucket->info.bytes > bytes) {
    suggest(
        "Set a smaller bucket_cap_mb: most bytes are in this one bucket, and none of them moves "
        "before its last gradient is there.");
  } else if (std::ranges::any_of(a_.buckets, several)) {
    suggest(
        "Try other values of bucket_cap_mb: larger buckets cost less each, smaller ones begin "
        "earlier.");
  }
  suggest("Register the hook that sends gradients as float16 or bfloat16: half the bytes.");
  suggest("Use fewer ranks with more threads each, or accumulate gradients with no_sync.");
}

void Diagnosis::add_figures() {
  if (a_.queued >= kNotableQueue && v_.finding != Finding::shared_cores) {
    because(
        "Ranks wait for a core {} of the time in which they have something to do: their cores are "
        "shared, with other work or with more threads than there are cores.",
        share_text(a_.queued));
  }
  because(
      "Of the time of all ranks, {} is computing, {} waiting for late ranks, {} communication "
      "that backward does not hide, {} between steps.",
      share_text(a_.computing), share_text(a_.late), share_text(a_.communication),
      share_text(a_.between));
}

}  // namespace

Verdict judge(const Analysis& analysis) {
  return Diagnosis(analysis).judge();
}

}  // namespace paceline::report
