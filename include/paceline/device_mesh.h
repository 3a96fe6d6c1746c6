#pragma once

/// @file
/// The ranks of the world in several dimensions.

#include <string>
#include <vector>

#include <paceline/api.h>
#include <paceline/distributed.h>

namespace paceline {

/// The ranks of the world as the elements of an array, as in PyTorch: rank = i * size("pp") + j in
/// a mesh of the dimensions "dp" and "pp". A copy refers to the same groups.
class PACELINE_API DeviceMesh {
 public:
  /// The ranks that differ from this one in this dimension only, in its order. Throws UsageError
  /// for an unknown name; so do the next two.
  const ProcessGroup& get_group(const std::string& dim_name) const;
  /// This rank's index in the dimension.
  int get_local_rank(const std::string& dim_name) const;
  /// The length of the dimension.
  int size(const std::string& dim_name) const;

 private:
  friend DeviceMesh init_device_mesh(const std::vector<int>& mesh_shape,
                                     const std::vector<std::string>& mesh_dim_names,
                                     const GroupOptions& options);
  struct Dimension {
    std::string name;
    ProcessGroup group;
  };
  const Dimension& at(const std::string& dim_name) const;

  std::vector<Dimension> dimensions_;
};

/// Makes a mesh of all ranks of the world, and a group for each row of each dimension:
///
///     const auto mesh = init_device_mesh({2, 4}, {"dp", "pp"});  // 8 ranks
///
/// Collective over the world. Throws UsageError unless the lengths are positive, their product is
/// the number of ranks, and each has a name of its own.
[[nodiscard]] PACELINE_API DeviceMesh
init_device_mesh(const std::vector<int>& mesh_shape, const std::vector<std::string>& mesh_dim_names,
                 const GroupOptions& options = {});

}  // namespace paceline
