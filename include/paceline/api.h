#pragma once

/// @file
/// Which names the shared library exports.

/// Exports a name from the shared library, which hides all others. Written by hand, since CMake's
/// GenerateExportHeader would add macros for Windows and for deprecation that nothing here uses.
#define PACELINE_API [[gnu::visibility("default")]]
