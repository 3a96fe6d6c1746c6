#pragma once

/// @file
/// Means and counts over the samples of all ranks.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <paceline/api.h>
#include <paceline/distributed.h>

namespace paceline {

/// Means and counts that each rank collects, and that the ranks combine in one call, as at the end
/// of an epoch:
///
///     paceline::Metrics metrics;
///     for (auto& [x, y] : loader) {
///       ...
///       metrics.add("loss", loss, x.size(0));  // a mean over x.size(0) samples
///       metrics.add_confusion("classes", output.argmax(1), y, 10);
///     }
///     const auto epoch = metrics.reduce();
///     paceline::print("loss " + std::to_string(epoch.mean("loss")));
///
/// Every sample has the same weight, however the ranks share them. Sums are rounded once, at the
/// end, so they do not depend on the order or the rank of what was added, as long as sums of values
/// times counts are within the range of double. Use it on one thread at a time.
class PACELINE_API Metrics {
 public:
  /// What all ranks have added, by name.
  struct Values {
    std::map<std::string, double> means{};  ///< Without samples: NaN.
    /// int64 of shape (classes, classes): how often there was which target (the row) and which
    /// prediction (the column).
    std::map<std::string, at::Tensor> confusions{};

    /// The mean of a name. NaN if no rank has added anything, as in an epoch that a resumed run has
    /// already seen to its end; otherwise throws UsageError if there are other names only.
    double mean(const std::string& name) const;
    /// The same for a confusion: zeros of shape (classes, classes) if no rank has added anything.
    at::Tensor confusion(const std::string& name, std::int64_t classes) const;
  };

  /// `group`: the ranks that combine their metrics.
  explicit Metrics(ProcessGroup group = {}) : group_(std::move(group)) {}

  /// Adds `count` samples whose mean is `value`. Throws UsageError if `count` is negative.
  void add(const std::string& name, double value, std::int64_t count = 1);
  /// The same for a tensor of one element, which is copied to the CPU.
  void add(const std::string& name, const at::Tensor& value, std::int64_t count = 1);
  /// Adds predicted and true classes, integers from 0 to classes - 1 of equal shapes. Throws
  /// UsageError for others, and if `name` was added with other `classes`.
  void add_confusion(const std::string& name, const at::Tensor& predictions,
                     const at::Tensor& targets, std::int64_t classes);

  /// Returns the metrics over all ranks, equal on all of them, and begins anew. A rank may have
  /// added less than others, or nothing. Throws UsageError if ranks have different numbers of
  /// classes for a name. Collective.
  [[nodiscard]] Values reduce();

 private:
  // Whose sum is exact: no two overlap in their bits.
  using Partials = std::vector<double>;
  struct Mean {
    Partials sum{};
    std::int64_t count = 0;
  };

  ProcessGroup group_;
  std::map<std::string, Mean> means_;
  std::map<std::string, at::Tensor> confusions_;
};

}  // namespace paceline
