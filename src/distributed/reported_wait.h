#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>

#include <paceline/distributed.h>

namespace paceline::distributed {

// The Work of a backend that reports long waits itself.
class SelfReportingWork : public c10d::Work {
 public:
  using c10d::Work::Work;
};

// The work, or one in its place for a message of Gloo: a wait for that with a time limit would
// close every connection of its group at the limit, so the one in its place waits on a thread of
// its own.
c10::intrusive_ptr<c10d::Work> with_limited_wait(c10::intrusive_ptr<c10d::Work> work);

// Whether the work, which is one of with_limited_wait, ends within the time. Waits of c10d differ:
// zero means for ever, and some backends can wait only until the end. Throws the work's error.
bool wait_within(c10d::Work& work, std::chrono::milliseconds time);

// Waits as work.wait() does. If another backend's collective takes long, the log says so: such a
// backend does not know which ranks are late, so each rank that has waited for a second counts
// itself in the store of `group`. Messages are not reported.
void wait_and_report(c10d::Work& work, const ProcessGroup& group);

}  // namespace paceline::distributed
