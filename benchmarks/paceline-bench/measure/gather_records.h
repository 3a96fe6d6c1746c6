#pragma once

#include <paceline/collectives.h>

#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace paceline::bench {

// The records of each rank, by rank; ranks may have differently many. Collective over the world.
template <typename Record>
std::vector<std::vector<Record>> gather_records(std::span<const Record> mine) {
  static_assert(std::is_trivially_copyable_v<Record>);
  const std::string_view bytes(reinterpret_cast<const char*>(mine.data()), mine.size_bytes());
  std::vector<std::vector<Record>> all;
  for (const std::string& theirs : all_gather_bytes(bytes)) {
    auto& records = all.emplace_back(theirs.size() / sizeof(Record));
    if (!records.empty()) std::memcpy(records.data(), theirs.data(), theirs.size());
  }
  return all;
}

// One of each rank.
template <typename Record>
std::vector<Record> gather_record(const Record& mine) {
  std::vector<Record> all;
  for (const auto& theirs : gather_records(std::span(&mine, 1))) all.push_back(theirs.front());
  return all;
}

}  // namespace paceline::bench
