#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace paceline::base {

// Whether a text is UTF-8, which JSON's texts are.
inline bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(nlohmann::json(text).dump());
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

}  // namespace paceline::base
