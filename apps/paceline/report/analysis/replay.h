#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "report/analysis/steps.h"

namespace paceline::report {

// Waiting for the rank that was last in a step.
struct Stall {
  double share = 0;              // of the time of the others
  std::map<int, double> causes;  // by the last rank, parts of 1 of the stall
};

// A model of the steps of a run, to tell how long they would last without one of the things that
// slow them down: ranks begin a period together, each is busy, and once the last rank has finished,
// all wait for communication. Times are in microseconds.
class Replay {
 public:
  explicit Replay(const std::vector<Step>& steps);

  // The mean period.
  double period() const;
  // Waiting for communication, of the time.
  double communication() const;
  // `ranks`: the number of each rank, in the order of Step::ranks.
  Stall stall(const std::vector<int>& ranks) const;

  // The same run, if no training thread ever waited for a core. Steps without such waits show how
  // long communication takes then.
  Replay without_queue() const;
  // If the rank at `index` computed as long as the others' median, or were as long between steps.
  Replay with_usual_computing(std::size_t index) const;
  Replay with_usual_between(std::size_t index) const;
  // If all ranks computed equally long, as long as they do on average.
  Replay with_even_computing() const;
  Replay with_communication(double part) const;
  // If training threads never waited between steps, for data say.
  Replay without_waiting_between() const;
  // A batch's time if ranks synchronised only after each `count` of them.
  double period_of_batch(std::size_t count) const;

 private:
  struct BusyRank {
    double computing = 0;
    double between = 0;
    double waiting_between = 0;  // of that, neither on a core nor waiting for one
    double queued = 0;           // of computing
    double queued_between = 0;   // of between
    double busy() const { return computing + between; }
  };
  struct ModelStep {
    std::vector<BusyRank> ranks;
    double communication = 0;
    bool queued = false;  // a rank waited for a core for a notable part of it
    double lasts() const;
  };

  static BusyRank busy_rank(const RankStep& step);
  void divide_queue();
  template <typename Change>
  Replay changed(Change change) const;
  double undisturbed_communication() const;
  double modelled() const;

  std::vector<ModelStep> steps_;
  double unexplained_ = 0;  // by the model, of the mean period
};

}  // namespace paceline::report
