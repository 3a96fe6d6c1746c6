#pragma once

/// @file
/// What Paceline throws.

#include <paceline/api.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace paceline {

/// The base of every exception that Paceline throws on purpose. The message says what was got, from
/// where, what is allowed and what to do. docs/errors.md lists the cases.
class PACELINE_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The program asked for something invalid: an option, an argument, or a call out of order.
class PACELINE_API UsageError : public Error {
 public:
  using Error::Error;
};

/// A file does not follow its format. The message names the path and the byte offset.
class PACELINE_API CorruptFile : public Error {
 public:
  using Error::Error;
};

/// The base of the errors about other ranks.
class PACELINE_API PeerError : public Error {
 public:
  /// The arguments become what(), ranks(), operation() and sequence().
  PeerError(const std::string& message, std::vector<int> ranks, std::string operation,
            std::uint64_t sequence)
      : Error(message),
        ranks_(std::move(ranks)),
        operation_(std::move(operation)),
        sequence_(sequence) {}

  /// The ranks at fault, as global ranks in ascending order. Empty if they are not known.
  const std::vector<int>& ranks() const { return ranks_; }
  /// What this rank was doing: "all_reduce", "connect", "backward" and so on.
  const std::string& operation() const { return operation_; }
  /// The number of that operation in its group (in DDP: the step), counted from 1; 0 if it has
  /// none.
  std::uint64_t sequence() const { return sequence_; }

 private:
  std::vector<int> ranks_;
  std::string operation_;
  std::uint64_t sequence_;
};

/// A rank has ended or has left the group. If it left because of an exception, the message has the
/// exception's text.
class PACELINE_API PeerLost : public PeerError {
 public:
  using PeerError::PeerError;
};

/// A rank did not arrive before the deadline. As far as can be seen, it is alive.
class PACELINE_API Timeout : public PeerError {
 public:
  using PeerError::PeerError;
};

/// The ranks made different calls (operation, type, size, root, reduction), have different models,
/// or did different things in a step (forwards, backwards under no_sync, frozen parameters, an
/// aborted backward, a communication hook that threw); or parameters got no gradient.
class PACELINE_API Mismatch : public PeerError {
 public:
  using PeerError::PeerError;
};

/// The base of what spawn throws if one of its processes failed.
class PACELINE_API ProcessException : public Error {
 public:
  /// The arguments become what() and error_index().
  ProcessException(const std::string& message, int error_index)
      : Error(message), error_index_(error_index) {}

  /// The rank of the process that failed first.
  int error_index() const { return error_index_; }

 private:
  int error_index_;
};

/// A process of spawn failed with an exception. The message has its text.
class PACELINE_API ProcessRaisedException : public ProcessException {
 public:
  using ProcessException::ProcessException;
};

/// A process of spawn ended by a signal or with an exit code, without an exception.
class PACELINE_API ProcessExitedException : public ProcessException {
 public:
  /// The arguments become what(), error_index(), exit_code() and signal_name().
  ProcessExitedException(const std::string& message, int error_index, int exit_code,
                         std::string signal_name)
      : ProcessException(message, error_index),
        exit_code_(exit_code),
        signal_name_(std::move(signal_name)) {}

  /// The exit code, or the negative number of the signal: -9 for SIGKILL. 0 if the process ended
  /// while other ranks needed it.
  int exit_code() const { return exit_code_; }
  /// "SIGKILL"; empty if no signal ended the process.
  const std::string& signal_name() const { return signal_name_; }

 private:
  int exit_code_;
  std::string signal_name_;
};

}  // namespace paceline
