package main

import (
	"context"
	"github.com/spf13/cobra"
)

func topCommand(std streams) *cobra.Command                              { return &cobra.Command{Use: "top"} }
func doctorCommand(std streams) *cobra.Command                           { return &cobra.Command{Use: "doctor"} }
func benchCommand(std streams) *cobra.Command                            { return &cobra.Command{Use: "bench"} }
func manCommand(std streams) *cobra.Command                              { return &cobra.Command{Use: "man"} }
func runFenceDemo(ctx context.Context, std streams, o demoOptions) error { return nil }
