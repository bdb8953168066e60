// Returns a line for each element of a part of the page with which axe finds fault.
async ([part, options]) => {
  const answer = await axe.run(part, {...options, resultTypes: ["violations"], preload: false});
  return answer.violations.flatMap((rule) => rule.nodes.map((node) =>
    `${rule.impact}: ${rule.id}: ${node.target.join(" ")}: ${node.html.slice(0, 160)}: ${node.failureSummary}`));
}
