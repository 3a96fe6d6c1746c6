#pragma once

#include <c10/util/Exception.h>

#include <paceline/error.h>

#include <string>

namespace paceline::distributed {

// Runs `body` and turns what LibTorch and its backends throw into an Error that says what was being
// done. Our own errors pass.
template <typename Body>
auto translate(const char* operation, Body&& body) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    throw Error(std::string(operation) + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw Error(std::string(operation) + ": " + error.what());
  }
}

}  // namespace paceline::distributed
