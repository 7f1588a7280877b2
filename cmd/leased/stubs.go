package main

import (
	"context"
	"github.com/spf13/cobra"
)

func runCommand(std streams) *cobra.Command                              { return &cobra.Command{Use: "run"} }
func topCommand(std streams) *cobra.Command                              { return &cobra.Command{Use: "top"} }
func doctorCommand(std streams) *cobra.Command                           { return &cobra.Command{Use: "doctor"} }
func benchCommand(std streams) *cobra.Command                            { return &cobra.Command{Use: "bench"} }
func guardCommand(std streams) *cobra.Command                            { return &cobra.Command{Use: "guard"} }
func manCommand(std streams) *cobra.Command                              { return &cobra.Command{Use: "man"} }
func concludeRun(std streams, err error) int                             { return conclude(std, err) }
func runFenceDemo(ctx context.Context, std streams, o demoOptions) error { return nil }
