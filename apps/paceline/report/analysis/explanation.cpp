#include "report/analysis/explanation.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/printable.h"
#include "report/analysis/replay.h"
#include "report/units.h"

namespace paceline::report {
namespace {

// The part of the cores that a job uses if it leaves nothing to others.
constexpr double kAllCores = 0.9;
// The part of the sleep between steps that pages must explain for a prediction without it.
constexpr double kExplainedSleep = 0.8;
// Batches between synchronisations, for which the gain is predicted.
constexpr std::size_t kAccumulated = 4;
// A rank that waits for a core this many times as long as all do on average is named.
constexpr double kLongest = 1.5;
// Part of the cores used by others from which on that is worth a sentence, and what others use of
// the machine's other cores, in parts of the job's cores.
constexpr double kNotableCores = 0.05;
constexpr double kNotableElsewhere = 0.25;
// Parts of the time from which on between_steps mentions waits for late ranks, and sleep in steps.
constexpr double kNotableStall = 0.10;
constexpr double kNotableSleep = 0.05;
// A sentence names no more ranks than this.
constexpr int kNamedRanks = 8;
// The part of the time between steps in which threads must sleep for remedies against waiting.
constexpr double kNotableWaiting = 0.2;

class Explanation {
 public:
  Explanation(Finding finding, const Analysis& analysis, const LateRank& late,
              const SlowRanks& slow)
      : a_(analysis), late_(late), slow_(slow), replay_(analysis.steps) {
    d_.finding = finding;
  }

  Diagnosis write() {
    describe();
    if (d_.finding != Finding::too_few_steps) add_figures();
    return std::move(d_);
  }

 private:
  void describe() {
    switch (d_.finding) {
      case Finding::too_few_steps:
        return too_few_steps();
      case Finding::all_well:
        return all_well();
      case Finding::straggler:
        return straggler();
      case Finding::slow_ranks:
        return slow_ranks();
      case Finding::late_starter:
        return late_starter();
      case Finding::too_many_ranks:
        return too_many_ranks();
      case Finding::same_cores:
        return same_cores();
      case Finding::cpu_limit:
        return cpu_limit();
      case Finding::shared_cores:
        return shared_cores();
      case Finding::memory:
        return memory();
      case Finding::uneven_load:
        return uneven_load();
      case Finding::communication:
        return exposed_communication();
      case Finding::delayed:
        return delayed();
      case Finding::short_steps:
        return short_steps();
      case Finding::between_steps:
        return between_steps();
      case Finding::pauses:
        return pauses();
    }
  }
  template <typename... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) {
    d_.sentence = fmt::format(format, std::forward<Args>(args)...);
  }
  template <typename... Args>
  void because(fmt::format_string<Args...> format, Args&&... args) {
    d_.why.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  // What the next remedies gain. None, if `period` is not shorter than what was measured.
  void predict(std::string if_what, double period) {
    predict(std::move(if_what), replay_.period(), period);
  }
  void predict(std::string if_what, double before, double after) {
    gain_.reset();
    if (after < before && time_text(after) != time_text(before)) {
      gain_ = Prediction{std::move(if_what), before, after};
    }
  }
  // If no thread waited for a core, and a step had `share` times the work. Only a replay can tell.
  void predict_without_queue(std::string if_what, double share = 1) {
    gain_.reset();
    if (a_.replayed) predict(std::move(if_what), share * replay_.without_queue().period());
  }
  template <typename... Args>
  void suggest(fmt::format_string<Args...> format, Args&&... args) {
    d_.remedies.push_back({fmt::format(format, std::forward<Args>(args)...), gain_});
  }
  void predict_accumulation() {
    predict(fmt::format("ranks synchronised only after each {} batches", kAccumulated),
            replay_.period_of_batch(kAccumulated));
  }
  void suggest_accumulation() {
    predict_accumulation();
    suggest("Accumulate gradients over several batches with no_sync.");
  }

  // The bucket with the longest waits of the kind `what`; it becomes the diagnosis's bucket.
  const BucketTimes* worst_bucket(double BucketTimes::*what) {
    const auto found = std::ranges::max_element(a_.buckets, {}, what);
    if (found == a_.buckets.end() || (*found).*what == 0) return nullptr;
    d_.bucket = found->number;
    return &*found;
  }
  static std::string described(const BucketTimes& bucket) {
    std::string text = fmt::format("bucket {}", bucket.number);
    if (bucket.info.bytes == 0) return text;
    text += fmt::format(" ({}", bytes_text(bucket.info.bytes));
    if (!bucket.info.parameters.empty())
      text += ": " + base::printable_line(bucket.info.parameters);
    return text + ")";
  }
  // Only if the sizes of all buckets are known.
  std::string expected_text() const {
    return fmt::format("A step's gradients have {}. {} that in {}", bytes_text(*bytes_of_step(a_)),
                       a_.reduction ? "As measured before the first step, idle ranks reduce"
                                    : "Even a slow network moves",
                       time_text(expected_communication(a_)->sum()));
  }
  std::size_t index_of_late_rank() const {
    return static_cast<std::size_t>(late_.times - a_.ranks.data());
  }
  std::string waits_for_it() const {
    return fmt::format("the others wait for it {} a step, {} of their time",
                       time_text(a_.settled.stall_per_step), share_text(a_.settled.stall));
  }
  // Of the ranks that train the model together, those without a timeline here.
  int unknown_ranks() const { return a_.group_size - static_cast<int>(a_.ranks.size()); }
  const char* known_ranks_have() const {
    return unknown_ranks() > 0 ? "the ranks with timelines have" : "all ranks have";
  }
  void add_unknown_ranks() {
    if (unknown_ranks() <= 0) return;
    because("{} of {} ranks have no timeline here, so they may be late instead.", unknown_ranks(),
            a_.group_size);
  }
  // Of the time in which threads could run; only if it is known.
  std::string queued() const { return share_text(a_.queued.value_or(0)); }

  void too_few_steps();
  void all_well();
  void straggler();
  void slow_ranks();
  void late_starter();
  void too_many_ranks();
  void same_cores();
  void cpu_limit();
  void shared_cores();
  void memory();
  void uneven_load();
  void exposed_communication();
  void short_steps();
  void between_steps();
  void pauses();
  void add_late_rank();
  void delayed();
  void suggest_buckets(const BucketTimes* worst);
  void add_figures();

  const Analysis& a_;
  const LateRank& late_;
  const SlowRanks& slow_;
  Replay replay_;
  std::optional<Prediction> gain_;
  Diagnosis d_;
};

void Explanation::too_few_steps() {
  say("Too few steps for a diagnosis: {} after {} of warm-up; {} are needed.", a_.steps.size(),
      a_.warm_up, kFewestSteps);
  suggest("Let the program run for 20 steps or more; a rank that is killed loses the last ones.");
  if (a_.models == 0) {
    because("No timeline has a step. Train a model in DistributedDataParallel.");
  }
}

void Explanation::all_well() {
  const std::pair<double, const char*> rest[] = {{a_.late, "waiting for slower ranks"},
                                                 {a_.communication, "communication"},
                                                 {a_.between, "time between steps"}};
  const auto [share, what] = *std::ranges::max_element(rest);
  say("All is well: {} of the time is computing; most of the rest is {} ({}).",
      share_text(a_.computing), what, share_text(share));
  suggest("To go faster, compute faster: OMP_NUM_THREADS, more ranks, a smaller model.");
}

void Explanation::straggler() {
  say("Rank {} holds this run back: {}.", late_.rank, waits_for_it());
  if (late_.times != nullptr) {
    // Others may compute as long only because they wait for cores.
    if (late_.more_computing > 0 && late_.usual_computing > 0) {
      say("Rank {} holds this run back: it computes {} a step, the others {} ({:+.0f} %); {}.",
          late_.rank, time_text(late_.times->computing), time_text(late_.usual_computing),
          100 * late_.more_computing / late_.usual_computing, waits_for_it());
    }
    predict(fmt::format("rank {} were as fast as the others", late_.rank),
            replay_.with_usual_computing(index_of_late_rank()).period());
    suggest(
        "Look at what else runs on rank {}'s cores, at its OMP_NUM_THREADS and at its share of the "
        "cores.",
        late_.rank);
    suggest(
        "Compare its batches with the other ranks' batches: are sequences longer, or images "
        "larger?");
  }
  add_late_rank();
}

void Explanation::slow_ranks() {
  std::string ranks = fmt::format("{}", fmt::join(slow_.ranks, ", "));
  if (slow_.ranks.size() > kNamedRanks) {
    ranks = fmt::format("{}, ... ({} of {})",
                        fmt::join(slow_.ranks.begin(), slow_.ranks.begin() + kNamedRanks, ", "),
                        slow_.ranks.size(), a_.ranks.size());
  }
  say("Ranks {} hold this run back: they compute {} a step, the others {} ({:+.0f} %); ranks wait "
      "for late ones {} a step, {} of their time.",
      ranks, time_text(slow_.computing), time_text(slow_.usual_computing),
      100 * (slow_.computing / slow_.usual_computing - 1), time_text(a_.settled.stall_per_step),
      share_text(a_.settled.stall));
  predict("these ranks were as fast as the others",
          replay_.with_part_of_computing(slow_.parts).period());
  suggest(
      "Look at the cores of these ranks: slower cores of the machine, another socket, a lower "
      "clock, other work, fewer cores for each rank or a smaller OMP_NUM_THREADS.");
  suggest("Compare their batches with the other ranks' batches: do they always get longer ones?");
}

void Explanation::late_starter() {
  say("Rank {} holds this run back: it starts its steps {} later than the others on average; {}.",
      late_.rank, time_text(late_.later_start), waits_for_it());
  predict(fmt::format("rank {} started with the others", late_.rank),
          replay_.with_usual_between(index_of_late_rank()).period());
  suggest(
      "Look for what rank {} alone does between steps: loading from a slower disk, logging, "
      "saving, metrics.",
      late_.rank);
  add_late_rank();
}

void Explanation::add_late_rank() {
  d_.rank = late_.rank;
  if (late_.times != nullptr && late_.times->queued.value_or(0) >= kNotableQueue) {
    because("Rank {} waits for a core {} of the time in which it could run.", late_.rank,
            share_text(*late_.times->queued));
  }
  because("Rank {} causes {} of the time for which others wait for a late rank.", late_.rank,
          share_text(late_.share));
  if (const BucketTimes* const bucket = worst_bucket(&BucketTimes::late)) {
    because("They wait longest for {}.", described(*bucket));
  }
}

// With more ranks than cores, other causes cannot be told apart.
void Explanation::too_many_ranks() {
  say("There are more ranks than cores: {} ranks take turns on {} core{}, and wait for each other "
      "for {} of their time.",
      a_.local_size, a_.cores, a_.cores == 1 ? "" : "s", share_text(a_.late + a_.communication));
  because(
      "A rank that waits for its turn on a core is late, or late with its part of a reduction.");
  const double share = static_cast<double>(a_.local_size) / a_.cores;
  predict_without_queue(fmt::format("{} ranks did the same work", a_.cores), share);
  suggest("Start no more ranks than the cores that they may use, {}, with larger batches.",
          a_.cores);
  suggest_accumulation();
}

void Explanation::same_cores() {
  say("Ranks {} are bound to the same cores, which are fewer.", fmt::join(a_.crowded, ", "));
  predict_without_queue("each rank had a core for itself");
  if (gain_) {
    say("Ranks {} are bound to the same cores, which are fewer: steps take {} instead of {}.",
        fmt::join(a_.crowded, ", "), time_text(gain_->before), time_text(gain_->after));
  }
  because("Each rank waits for the others of its cores: {} of the time in which ranks could run.",
          queued());
  suggest("Bind each rank to cores of its own, or do not bind them (taskset, cpusets).");
}

void Explanation::cpu_limit() {
  say("The CPU limit of the job's cgroup stops its ranks: they wait {} of the time in which they "
      "could run.",
      queued());
  because("In {} of its periods the job used up its limit.",
          share_text(a_.machine.throttled.value_or(0)));
  if (a_.machine.used) because("On average it uses {:.1f} cores.", *a_.machine.used);
  predict_without_queue("the limit were higher");
  suggest("Raise the limit (cpu.max; of a container --cpus, or its cpu limit).");
  gain_.reset();
  suggest("Start fewer ranks or threads, no more than the limit has cores.");
}

void Explanation::memory() {
  say("The machine lacks memory: tasks wait for it {} of the time, and ranks read pages back from "
      "the disk {:.1f} times a step.",
      share_text(a_.machine.memory_pressure.value_or(0)), a_.faults.value_or(0));
  const double reading = a_.reading_between.value_or(0);
  if (reading > 0) {
    because("Between steps, ranks wait for pages up to {} of the time.", share_text(reading));
  }
  const double asleep = a_.waiting_between.value_or(0) * a_.between;
  if (a_.replayed && reading > 0 && reading >= kExplainedSleep * asleep) {
    predict("ranks never waited for pages between steps",
            replay_.without_waiting_between().period());
  }
  suggest("Look at what else uses memory (top, free), and end it.");
  suggest("Raise the job's memory limit, or use fewer ranks or smaller batches.");
}

void Explanation::shared_cores() {
  const std::string waits = fmt::format(
      "ranks wait for a core {} of the time in which they could run, and wait for each other {} of "
      "all time",
      queued(), share_text(a_.late + a_.communication));
  predict_without_queue("the ranks had their cores for themselves");
  const bool others = a_.machine.foreign.value_or(0) > kNotableCores * a_.cores;
  const bool all_used = a_.cores > 0 && a_.machine.used.value_or(0) >= kAllCores * a_.cores;
  if (!a_.machine.foreign && !a_.machine.used) {
    say("The cores are shared, with other work or too many threads of the job itself: {}.", waits);
    suggest(
        "Look at what runs on these cores (top): keep other work to other cores, or set a "
        "smaller OMP_NUM_THREADS.");
  } else if (a_.machine.foreign ? !others : all_used) {
    say("The job's threads share too few cores: {}.", waits);
    suggest(
        "Set a smaller OMP_NUM_THREADS: the threads of all ranks should not outnumber the cores.");
  } else {
    say("The cores are shared with other work: {}.", waits);
    suggest("Look at what else runs on these cores (top), and keep it to other cores.");
    suggest("Start fewer ranks, or bind them to cores that nothing else uses (taskset, cpusets).");
  }
  if (a_.machine.used && a_.cores > 0) {
    because("The ranks use {:.1f} of {} cores, on average.", *a_.machine.used, a_.cores);
  }
  if (others) {
    because(
        "Processes that are no ranks use {:.1f} of the job's cores: other programs, or processes "
        "that ranks started, such as a data loader's workers.",
        *a_.machine.foreign);
  }
  const auto most = std::ranges::max_element(a_.ranks, {}, &RankTimes::queued);
  if (most != a_.ranks.end() && most->queued && *most->queued >= kLongest * *a_.queued) {
    because("Rank {} waits longest: {} of the time in which it could run.", most->rank,
            share_text(*most->queued));
  }
  if (a_.machine.cpu_pressure) {
    because("On this machine, some thread waits for a core {} of the time.",
            share_text(*a_.machine.cpu_pressure));
  }
  because("A rank that waits for a core is late, or late with its part of a reduction.");
}

void Explanation::uneven_load() {
  worst_bucket(&BucketTimes::late);
  say("The load is uneven: different ranks are late in different steps, and the others wait {} a "
      "step, {} of their time.",
      time_text(a_.settled.stall_per_step), share_text(a_.settled.stall));
  because(
      "No rank causes three quarters of the time for which others wait for a late rank; rank {} "
      "causes most, {}.",
      late_.rank, share_text(late_.share));
  predict("all ranks' batches cost the same", replay_.with_even_computing().period());
  suggest(
      "Make batches of equal cost: bucket sequences by length, or bound a batch by its tokens.");
  suggest_accumulation();
}

void Explanation::exposed_communication() {
  const BucketTimes* const bucket = worst_bucket(&BucketTimes::communication);
  if (bucket == nullptr) {
    say("Communication is exposed: {} of the time is spent waiting for gradients that {} computed.",
        share_text(a_.communication), known_ranks_have());
  } else {
    say("Communication is exposed: {} of the time is spent waiting for gradients that {} computed, "
        "most of it for bucket {}.",
        share_text(a_.communication), known_ranks_have(), bucket->number);
    because("Ranks wait longest for {}.", described(*bucket));
  }
  add_unknown_ranks();
  because("Backward hid {} of the communication.", share_text(a_.overlap));
  if (a_.reduction && bytes_of_step(a_)) because("{}.", expected_text());
  if (!bytes_of_step(a_)) {
    because("Timelines lack the size of a bucket, so ranks may as well delay each other.");
  }
  suggest_buckets(bucket);
}

void Explanation::delayed() {
  const double expected = expected_communication(a_)->sum();  // known, else this were communication
  const double waited = a_.settled.communication * a_.mean_period;
  say("Ranks delay each other in reductions: they wait {} a step for gradients that {} computed, "
      "{} of the time.",
      time_text(waited), known_ranks_have(), share_text(a_.settled.communication));
  because("{}, so their size does not explain {} a step.", expected_text(), time_text(waited));
  if (unknown_ranks() > 0) {
    add_unknown_ranks();
    suggest(
        "Look for a late rank, or a slow network, where the other ranks run: read the report, or "
        "watch paceline top, there.");
    return;
  }
  predict(a_.reduction ? "reductions took no longer than measured before the first step"
                       : "reductions took no longer than on a slow network",
          replay_.with_communication(std::min(1.0, expected / waited)).period());
  suggest(
      "Look at what else runs on the ranks' cores: a rank may be late with its part of the sum.");
  suggest_accumulation();
}

// A large gradient has a bucket of its own, whatever the cap.
void Explanation::suggest_buckets(const BucketTimes* worst) {
  const auto several = [](const BucketTimes& one) {
    return one.info.parameters.find(", ") != std::string::npos;
  };
  const auto bytes = bytes_of_step(a_);
  predict("backward hid all communication", replay_.with_communication(0).period());
  if (worst != nullptr && several(*worst) && bytes && 2 * worst->info.bytes > *bytes) {
    suggest(
        "Set a smaller bucket_cap_mb: most bytes are in this one bucket, and none of them is sent "
        "before its last gradient is ready.");
  } else if (std::ranges::any_of(a_.buckets, several)) {
    suggest(
        "Try other values of bucket_cap_mb: larger buckets cost less each, smaller ones start "
        "earlier.");
  }
  if (bytes) {
    predict("communication took half as long", replay_.with_communication(0.5).period());
    suggest("Register the hook that sends gradients as float16 or bfloat16: half the bytes.");
  }
  suggest_accumulation();
  gain_.reset();
  suggest("Use fewer ranks with more threads each.");
}

void Explanation::short_steps() {
  say("The steps are too short: a step takes {}, and ranks wait for each other for {} of it.",
      time_text(a_.mean_period), share_text(a_.late + a_.communication));
  because("Waking a rank that sleeps takes tens of microseconds, however small the gradients.");
  predict_accumulation();
  suggest("Use a larger batch, so that each step computes more.");
  suggest_accumulation();
}

void Explanation::between_steps() {
  say("{} of the time passes between steps, outside of forward and backward: {} of {} a step.",
      share_text(a_.between), time_text(a_.between * a_.mean_period), time_text(a_.mean_period));
  because(
      "Between the end of a backward and the next forward are the optimizer, the data loader, "
      "metrics, logging, and collective calls, in which ranks may wait for a late one.");
  if (a_.waiting_between) {
    because("Threads neither run nor wait for a core in {} of this time.",
            share_text(*a_.waiting_between));
  }
  if (a_.asleep_in_steps.value_or(0) >= kNotableSleep) {
    because(
        "{} a step is sleep within steps, after one forward or backward and before the next: "
        "between batches that accumulate gradients, or between forwards without a backward.",
        time_text(*a_.asleep_in_steps * a_.mean_period));
  }
  if (a_.settled.stall >= kNotableStall) {
    because(
        "The others wait for the last rank {} a step. Rank {} causes {} of the time for which "
        "others wait for a late rank.",
        time_text(a_.settled.stall_per_step), late_.rank, share_text(late_.share));
  }
  if (a_.waiting_between.value_or(1) >= kNotableWaiting) {
    if (a_.replayed) {
      predict("ranks never waited between steps, for data or each other",
              replay_.without_waiting_between().period());
    }
    suggest("Give the data loader workers (num_workers), or more of them, and let them prefetch.");
    suggest(
        "Look for collective calls between steps, such as an all_reduce of a metric, which "
        "timelines do not contain: make fewer, and find the rank that comes to them last.");
    gain_.reset();
  }
  suggest(
      "Time optimizer.step() by itself: if it takes most of this time, use larger batches, so that "
      "it runs less often.");
  suggest("Log and compute metrics only every few steps.");
}

void Explanation::pauses() {
  say("{} of the time passes in {} long pause{} between steps.", share_text(a_.pause_share),
      a_.pauses, a_.pauses == 1 ? "" : "s");
  if (a_.steps.size() < kFewestSteps) {
    because(
        "Without pauses and the step after each, {} step{} of the run {} left, too few to judge.",
        a_.steps.size(), a_.steps.size() == 1 ? "" : "s", a_.steps.size() == 1 ? "is" : "are");
  } else if (a_.pause_share < 1) {
    predict("there were no pauses", replay_.period() / (1 - a_.pause_share), replay_.period());
  }
  suggest("Evaluate and save checkpoints less often, or on all ranks at once, each its share.");
  suggest("Keep the data loader's workers from one epoch to the next instead of restarting them.");
}

void Explanation::add_figures() {
  if (a_.queued.value_or(0) >= kNotableQueue && d_.finding != Finding::shared_cores) {
    because(
        "Ranks wait for a core {} of the time in which they could run: they share their cores with "
        "other work, or have more threads than cores.",
        queued());
  }
  if (a_.cores > 0 && a_.machine.elsewhere.value_or(0) >= kNotableElsewhere * a_.cores) {
    because(
        "Of the machine's other cores, {:.1f} are in use, by other programs or by threads and "
        "processes that ranks started. If they use much memory, that slows all down.",
        *a_.machine.elsewhere);
  }
  if (a_.machine.stolen.value_or(0) >= kNotableCores * a_.cores && a_.cores > 0) {
    because("The host of this virtual machine takes {:.1f} of the job's cores.",
            *a_.machine.stolen);
  }
  if (a_.steps.empty()) return;
  because(
      "All ranks together spend {} of their time computing, {} waiting for late ranks, {} in "
      "communication that backward does not hide, and {} between steps.",
      share_text(a_.computing), share_text(a_.late), share_text(a_.communication),
      share_text(a_.between));
}

}  // namespace

Diagnosis explain(Finding finding, const Analysis& analysis, const LateRank& late,
                  const SlowRanks& slow) {
  return Explanation(finding, analysis, late, slow).write();
}

}  // namespace paceline::report
