#pragma once

namespace paceline::report {

// One colour for one meaning throughout: blue computes, orange waits for a rank, purple is
// communication, grey is between steps.
inline constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1d2026;--soft:#5d6470;
--line:#e2e3e0;
--forward:#94bfe3;--backward:#3b74b0;--late:#dd7433;--comm:#8a63bd;--between:#c6cad0;--onbar:#fff}
@media (prefers-color-scheme:dark){:root{--page:#15171b;--card:#1d2025;--ink:#e8e9ec;--soft:#a0a6b1;
--line:#343941;--forward:#7fb0da;--backward:#4379b3;--late:#ee8a4c;--comm:#8f6cc9;
--between:#4d535d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:24px;line-height:1.3;font-weight:650;margin:4px 0 12px;text-wrap:balance;
overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 2px}
p,ul{margin:6px 0}
ul{padding-left:20px}
li{overflow-wrap:anywhere}
.soft,figcaption{color:var(--soft);font-size:13px}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:16px;
margin-top:16px}
.verdict{border-left:5px solid var(--late)}
.verdict.well{border-left-color:var(--backward)}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(260px,1fr));gap:4px 32px}
.columns h2{font-size:15px}
.key{display:flex;flex-wrap:wrap;gap:2px 18px;margin:8px 0;font-size:13px}
.key span::before{content:"";display:inline-block;width:11px;height:11px;border-radius:2px;
margin-right:6px;
background:var(--c);opacity:var(--o,1)}
.key .line::before{height:3px;margin-bottom:4px}
.row{display:grid;grid-template-columns:62px minmax(0,1fr);align-items:start;margin-top:10px;
font-size:13px}
.row svg{display:block;width:100%;overflow:hidden}
.row svg.loose{overflow:visible}
.row>div:first-child{padding-top:2px;white-space:nowrap}
.chart>div:first-child{padding-top:0}
.named>div:first-child{font-weight:650;color:var(--late)}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg .in{fill:var(--onbar);font-size:10px}
svg .on{fill:var(--ink);font-size:10px}
.forward{--c:var(--forward)}.backward{--c:var(--backward)}.late{--c:var(--late)}.comm{
--c:var(--comm)}
.between{--c:var(--between)}.open{--c:var(--comm);--o:.35}.ink{--c:var(--ink)}
rect{fill:var(--c);opacity:var(--o,1);shape-rendering:crispEdges}
polyline{fill:none;stroke:var(--c);vector-effect:non-scaling-stroke;stroke-width:1.2;
stroke-linejoin:round}
polyline.ink{stroke-width:1.6}polyline.late{stroke-width:1.8}polyline.backward{opacity:.6}
.grid{stroke:var(--line);stroke-width:1}
.scroll{overflow-x:auto;margin-top:8px;background:linear-gradient(90deg,var(--card) 30%,
transparent) 0 0/40px 100%
local,linear-gradient(270deg,var(--card) 30%,transparent) 100% 0/40px 100% local,
linear-gradient(90deg,#0004,transparent)
0 0/10px 100% scroll,linear-gradient(270deg,#0004,transparent) 100% 0/10px 100% scroll;
background-repeat:no-repeat}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:4px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--soft);white-space:normal;vertical-align:bottom;line-height:1.25;
max-width:136px}
th:first-child,td:first-child{padding-left:0;text-align:left}
td.text,th.text{text-align:left}
td.text{white-space:normal;overflow-wrap:anywhere;min-width:200px}
tr.named td{font-weight:650}
table.pairs td{border:2px solid var(--card);min-width:64px}
@media (max-width:640px){.wide{display:none}h1{font-size:20px}section{padding:12px}}
)";

}  // namespace paceline::report
