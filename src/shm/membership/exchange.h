#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"

namespace paceline::shm {

// How ranks find each other before they share memory: an all-gather of small blobs. Over a
// c10d::Store in `distributed`, between threads in tests.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Gives every rank's blob, by rank. Throws Timeout naming the ranks that did not come.
  virtual std::vector<std::string> all_gather(const std::string& blob,
                                              const base::Deadline& deadline) = 0;
};

}  // namespace paceline::shm
