#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "report/analysis/steps.h"

namespace paceline::report {

// What is left of waiting, in microseconds a step.
struct Waiting {
  double stall = 0;                    // of the others for the last rank
  std::map<int, double> stall_causes;  // by the last rank, parts of 1 of the stall
  double communication = 0;
  double between = 0;  // the mean time between steps
};

// A model of the steps of a run, to tell how long they would last without one of the things that
// slow them down: ranks do what they do between two steps and compute; once the last one has
// published all buckets, all wait for communication. A rank may finish as much later as it waited
// for the last one before it is the last itself. Times are in microseconds.
class Replay {
 public:
  explicit Replay(const std::vector<Step>& steps);

  // The mean period.
  double period() const;
  // `ranks`: the number of each rank, in the order of Step::ranks.
  Waiting waiting(const std::vector<int>& ranks) const;

  // The same run, if no training thread ever waited for a core. Steps without such waits show how
  // long communication takes then.
  Replay without_queue() const;
  // If the rank at `index` computed as long as the others' median, or were as long between steps.
  Replay with_usual_computing(std::size_t index) const;
  Replay with_usual_between(std::size_t index) const;
  // If the rank at each index computed `parts` of what it did.
  Replay with_part_of_computing(const std::vector<double>& parts) const;
  // If all ranks computed equally long, or were equally long between steps: as long as they are on
  // average.
  Replay with_even_computing() const;
  Replay with_even_between() const;
  Replay with_communication(double part) const;
  // If training threads never waited between steps, for data say.
  Replay without_waiting_between() const;
  // A batch's time if ranks synchronised only after each `count` of them.
  double period_of_batch(std::size_t count) const;

 private:
  struct BusyRank {
    double computing = 0;
    double between = 0;           // before the step, if the step before it is known
    double offset = 0;            // from when it had done both to its last bucket
    double waiting_between = 0;   // of between, neither on a core nor waiting for one
    double queued = 0;            // of computing
    double queued_between = 0;    // of between
    double queued_elsewhere = 0;  // of waiting for communication, at most
    double busy() const { return computing + between; }
    double published() const { return busy() + offset; }
  };
  struct ModelStep {
    std::vector<BusyRank> ranks;
    double communication = 0;
    double spare = 0;     // for which all ranks waited for a late one
    int last_rank = -1;   // that the others waited for
    bool queued = false;  // a rank waited for a core for a notable part of it
    double queued_elsewhere() const;
    double lasts() const;
    double longest() const;
    double last_published() const;
  };

  static BusyRank busy_rank(const RankStep& step, const RankStep& before);
  void divide_queue();
  template <typename Change>
  Replay changed(Change change) const;
  Replay with_usual(double BusyRank::*what, std::size_t index) const;
  Replay with_even(double BusyRank::*what) const;
  double undisturbed_communication() const;
  double period_of(double modelled, double longest) const;

  std::vector<ModelStep> steps_;
  double unexplained_ = 0;  // by the model, of the mean period
};

}  // namespace paceline::report
