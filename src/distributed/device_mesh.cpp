#include <paceline/device_mesh.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <set>

#include <paceline/error.h>

namespace paceline {
namespace {

void check_mesh(const std::vector<int>& shape, const std::vector<std::string>& names) {
  const std::set<std::string> different(names.begin(), names.end());
  if (names.size() != shape.size() || different.size() != names.size()) {
    throw UsageError(fmt::format(
        "init_device_mesh: {} dimensions with the names {}: each needs a name of its own",
        shape.size(), fmt::join(names, ", ")));
  }
  std::int64_t ranks = 1;
  for (const int length : shape) ranks = length < 1 ? 0 : ranks * length;
  if (ranks == get_world_size()) return;
  throw UsageError(fmt::format(
      "init_device_mesh of {} ranks: lengths must be positive, and their product {}, the number of "
      "ranks",
      fmt::join(shape, " x "), get_world_size()));
}

}  // namespace

DeviceMesh init_device_mesh(const std::vector<int>& mesh_shape,
                            const std::vector<std::string>& mesh_dim_names,
                            const GroupOptions& options) {
  check_mesh(mesh_shape, mesh_dim_names);
  DeviceMesh mesh;
  const int ranks = get_world_size();
  int stride = ranks;  // of ranks that are neighbours in the dimension
  for (std::size_t d = 0; d < mesh_shape.size(); ++d) {
    const int length = mesh_shape[d];
    stride /= length;
    DeviceMesh::Dimension dimension{.name = mesh_dim_names[d], .group = {}};
    for (int first = 0; first < ranks; ++first) {
      if (first / stride % length != 0) continue;
      std::vector<int> row;
      for (int i = 0; i < length; ++i) row.push_back(first + i * stride);
      ProcessGroup group = new_group(row, options);
      if (group.is_member()) dimension.group = group;
    }
    mesh.dimensions_.push_back(dimension);
  }
  return mesh;
}

const DeviceMesh::Dimension& DeviceMesh::at(const std::string& dim_name) const {
  std::vector<std::string> names;
  for (const Dimension& dimension : dimensions_) {
    if (dimension.name == dim_name) return dimension;
    names.push_back(dimension.name);
  }
  throw UsageError(
      fmt::format("the mesh has no dimension {}; it has {}", dim_name, fmt::join(names, ", ")));
}

const ProcessGroup& DeviceMesh::get_group(const std::string& dim_name) const {
  return at(dim_name).group;
}
int DeviceMesh::get_local_rank(const std::string& dim_name) const {
  return get_rank(get_group(dim_name));
}
int DeviceMesh::size(const std::string& dim_name) const {
  return get_world_size(get_group(dim_name));
}

}  // namespace paceline
