#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "node/exchange.h"

namespace paceline::distributed {

// An all-gather of small blobs over a c10d store whose keys are this group's own. For one use.
class StoreExchange final : public node::Exchange {
 public:
  StoreExchange(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> all_gather(const std::string& blob,
                                      const base::Deadline& deadline) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
};

}  // namespace paceline::distributed
