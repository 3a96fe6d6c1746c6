#pragma once

#include <fmt/format.h>

#include <concepts>
#include <string>
#include <string_view>

#include <paceline/error.h>

namespace paceline::parallel {

// Runs collective calls that the library makes by itself, and adds their purpose to their errors.
// Returns what `body` returns.
// `purpose`: a text, or a function that returns one and is called for errors only.
template <typename Purpose, typename Body>
auto with_error_context(const Purpose& purpose, Body&& body,
                        std::string_view caller = "DistributedDataParallel") {
  const auto explained = [&](const PeerError& error) {
    std::string text;
    if constexpr (std::invocable<const Purpose&>) {
      text = purpose();
    } else {
      text = purpose;
    }
    return fmt::format("{} ({} was {})", error.what(), caller, text);
  };
  try {
    return body();
  } catch (const PeerLost& error) {
    throw PeerLost(explained(error), error.ranks(), error.operation(), error.sequence());
  } catch (const Timeout& error) {
    throw Timeout(explained(error), error.ranks(), error.operation(), error.sequence());
  } catch (const Mismatch& error) {
    throw Mismatch(explained(error), error.ranks(), error.operation(), error.sequence());
  }
}

}  // namespace paceline::parallel
