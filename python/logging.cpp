#include "logging.h"

#include <torch/csrc/utils/pybind.h>

#include <paceline/log.h>

#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/signals_blocked.h"
#include "shm/sync/fork_generation.h"

namespace py = pybind11;

namespace paceline::python {
namespace {

// Logs on a thread of its own, which starts with the first message. A thread of the library may
// hold locks while it logs, so it must neither wait for the GIL nor run a handler of the program.
class LogWriter {
 public:
  void add(LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex_);
    messages_.push_back({level, std::string(text)});
    if (!thread_.joinable()) {
      const base::SignalsBlocked blocked;
      thread_ = std::thread([this] { run(); });
    }
    changed_.notify_one();
  }
  // Logs what is left. Call without the GIL, and nothing afterwards.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }
  bool belongs_to_parent() const { return process_.is_forked_child(); }

 private:
  struct Message {
    LogLevel level;
    std::string text;
  };

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || !messages_.empty(); });
      if (messages_.empty()) return;
      const auto messages = std::exchange(messages_, {});
      lock.unlock();
      for (const Message& message : messages) write(message);
      lock.lock();
    }
  }

  static void write(const Message& message) {
    constexpr int kLevels[] = {10, 20, 30, 40};  // logging.DEBUG, INFO, WARNING, ERROR
    const py::gil_scoped_acquire gil;
    try {
      const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
          message.text.data(), static_cast<Py_ssize_t>(message.text.size()), "replace"));
      const py::object logger = py::module_::import("logging").attr("getLogger")("paceline");
      logger.attr("log")(kLevels[static_cast<std::size_t>(message.level)], text);
    } catch (py::error_already_set& error) {  // of a handler or a filter
      error.discard_as_unraisable("the logger paceline");
    }
  }

  shm::OwningProcess process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Message> messages_;
  std::thread thread_;
  bool stopping_ = false;
};

// Never destroyed. Changed by the log callback only, which is called once at a time.
LogWriter* writer = nullptr;

void receive(LogLevel level, std::string_view text) {
  try {
    // A forked child has neither its parent's thread nor the parent's messages.
    if (writer == nullptr || writer->belongs_to_parent()) writer = new LogWriter;
    writer->add(level, text);
  } catch (const std::exception&) {
    // No memory or no thread for the message.
  }
}

// At exit, since a thread that asks for the GIL later would be ended in the middle.
void stop_logging() {
  const py::gil_scoped_release release;
  set_log_callback({});
  if (writer != nullptr && !writer->belongs_to_parent()) writer->stop();
}

}  // namespace

void log_to_python() {
  set_log_callback(receive);
  py::module_::import("atexit").attr("register")(py::cpp_function(stop_logging));
}

}  // namespace paceline::python
