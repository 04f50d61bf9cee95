// Judge a history of lockkit (JSON lines) with Porcupine, a checker of linearizability that is not lockkit's.
//
// In a clone of https://github.com/anishathalye/porcupine, as main.go in a folder of its own:
//
//	go run ./FOLDER history.json
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

// A line of the history: a call begins with "invoke", and ends with "ok", "fail" (it did not happen), "info"
// (nobody knows) or not at all.
type line struct {
	Process int
	Type    string
	F       string
	Value   int64 // of an acquisition: its fencing token
	Lock    string
}

// A lock: who holds it, if anybody does, and the highest token so far.
type state struct {
	held    bool
	holder  int
	highest int64
}

// Only "acquire" and "release" of one lock get here. An operation whose end nobody knows may have happened or not.
func step(s, input, output interface{}) []interface{} {
	now, call, after := s.(state), input.(line), []interface{}{}
	token, known := output.(int64)
	if !known {
		after = append(after, now)
	}
	switch {
	case call.F == "acquire" && !now.held && !known:
		after = append(after, state{true, call.Process, now.highest})
	case call.F == "acquire" && !now.held && token > now.highest:
		after = append(after, state{true, call.Process, token})
	case call.F == "release" && now.held && now.holder == call.Process:
		after = append(after, state{highest: now.highest})
	}
	return after
}

func read(name string) map[string][]porcupine.Operation {
	file, err := os.Open(name)
	if err != nil {
		panic(err)
	}
	defer file.Close()
	type caller struct {
		lock    string
		process int
	}
	locks, begun := map[string][]porcupine.Operation{}, map[caller]int{}
	number, scanner := int64(0), bufio.NewScanner(file)
	for ; scanner.Scan(); number++ {
		var l line
		if err := json.Unmarshal(scanner.Bytes(), &l); err != nil {
			panic(err)
		}
		who, calls := caller{l.Lock, l.Process}, locks[l.Lock]
		if l.Type == "invoke" {
			begun[who] = len(calls)
			locks[l.Lock] = append(calls, porcupine.Operation{ClientId: l.Process, Input: l, Call: number, Return: -1})
			continue
		}
		call := &calls[begun[who]]
		if l.Type == "ok" {
			call.Output, call.Return = l.Value, number
		} else if l.Type == "fail" {
			call.Return = -2
		}
	}
	for lock, calls := range locks {
		ended := calls[:0]
		for _, call := range calls {
			if call.Return == -1 {
				call.Return = number
			}
			if call.Return >= 0 {
				ended = append(ended, call)
			}
		}
		locks[lock] = ended
	}
	return locks
}

func main() {
	free := porcupine.NondeterministicModel{Init: func() []interface{} { return []interface{}{state{}} }, Step: step}
	status := 0
	for lock, calls := range read(os.Args[1]) {
		verdict := porcupine.CheckOperationsTimeout(free.ToModel(), calls, 5*time.Minute)
		fmt.Printf("%s: %s, %d calls\n", lock, verdict, len(calls))
		if verdict != porcupine.Ok {
			status = 1
		}
	}
	os.Exit(status)
}
