# Compiles for another system with Clang as `zig c++` of the Python package ziglang, which has the headers of all of them:
# cmake --toolchain native/zig.cmake -DONWARD_TARGET=aarch64-macos -DONWARD_PYTHON=.venv/bin/python
# Not for use: without optimization, so that it takes a minute.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ONWARD_TARGET ONWARD_PYTHON)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)  # zig builds a C++ library before it links for the first time
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${ONWARD_TARGET}")
if(ONWARD_TARGET MATCHES "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
else()
  set(CMAKE_SYSTEM_NAME Linux)
endif()
set(CMAKE_CXX_COMPILER "${ONWARD_PYTHON}" -m ziglang c++ -target "${ONWARD_TARGET}")
set(CMAKE_CXX_FLAGS_INIT "-fno-sanitize=all")  # which zig adds to -O0
set(ONWARD_OPTIMIZATION "-O0" CACHE STRING "")
set(ONWARD_ARM "-mcpu=generic" CACHE STRING "")  # zig has no -march
set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)  # zig has no names for them
