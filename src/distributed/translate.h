#pragma once

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <paceline/error.h>

#include <string>
#include <typeinfo>

namespace paceline::distributed {

// The text of the exception being handled, without the backtrace that LibTorch's carry. Never
// empty.
inline std::string current_exception_text() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.empty() ? c10::demangle(typeid(error).name()) + " without a text" : text;
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

// Runs `body` and turns what LibTorch and its backends throw into an Error that says what was being
// done. Our own errors pass.
template <typename Body>
auto translate(const char* operation, Body&& body) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(std::string(operation) + ": " + current_exception_text());
  }
}

}  // namespace paceline::distributed
